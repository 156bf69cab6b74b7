from typing import Any

import numpy as np
import pytest

from ptf.data.encode import Encoder, encode_chat, encode_prompt, fit
from ptf.data.sample import Sample
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}


def test_a_chat_row_is_an_atom(characters: Tokenizer) -> None:
    ((sample,),) = encode_chat({"messages": [USER, ASSISTANT]}, characters, "sums")
    assert characters.decode(sample.tokens) == "<|im_start|><|user|>1+1=<|im_end|><|im_start|><|assistant|>2<|im_end|>"
    assert characters.decode(sample.tokens[sample.weights > 0]) == "2<|im_end|>"
    assert (sample.source, sample.tokens.dtype, sample.weights.dtype) == ("sums", np.int32, np.float32)


@pytest.mark.parametrize("row", [{"messages": [USER], "answer": "2"}, {"prompt": "1+1=", "answer": "2"}])
def test_a_prompt_row_ends_where_the_model_speaks(characters: Tokenizer, row: dict[str, Any]) -> None:
    prompt = encode_prompt(row, characters, "sums", 7)
    assert characters.decode(prompt.tokens) == "<|im_start|><|user|>1+1=<|im_end|><|im_start|><|assistant|>"
    assert (prompt.row, prompt.source, prompt.index) == (row, "sums", 7)  # all columns are there for the reward


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, ASSISTANT]}, "must end before the answer"),
        ({"question": "1+1="}, r"needs `messages` or a string `prompt`, this one has \['question'\]"),
    ],
)
def test_bad_prompts_are_refused(characters: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode_prompt(row, characters, "sums", 0)


def sample(n: int, trained: int) -> Sample:
    return Sample(np.arange(n, dtype=np.int32), (np.arange(n) >= n - trained).astype(np.float32), "", {"advantages": np.arange(n, dtype=np.float32)})


def test_what_is_too_long_is_refused_dropped_or_cut() -> None:
    atom = (sample(10, 6),)
    assert fit(atom, 10, "error") is atom
    with pytest.raises(UserError, match=r"10 tokens do not fit data\.seq_len 8: raise it, or set data\.too_long"):
        fit(atom, 8, "error")
    assert fit(atom, 8, "drop") is None
    (cut,) = fit(atom, 8, "truncate") or ()
    assert cut.tokens.tolist() == cut.streams["advantages"].tolist() == list(range(8))
    assert cut.weights.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert fit(atom, 4, "truncate") is None  # nothing that is trained is left
    pair = fit((sample(10, 8), sample(4, 3)), 8, "truncate") or ()
    assert [len(s) for s in pair] == [4, 4]


def test_the_encoder_counts_and_names_the_row(characters: Tokenizer) -> None:
    long = {"role": "assistant", "content": "2" * 30}
    encoder = Encoder(lambda row, name: encode_chat(row, characters, name), "sums", 20, "truncate")
    encoder(({"messages": [USER, ASSISTANT]}, "a.jsonl:1"))
    encoder(({"messages": [USER, long]}, "a.jsonl:2"))
    encoder(({"messages": [USER | {"content": "1" * 30}, ASSISTANT]}, "a.jsonl:3"))
    assert encoder.counts == {"rows": 3, "samples": 2, "tokens": 31, "trained": 2 + 11, "whole": 31, "dropped": 1, "truncated": 1}
    with pytest.raises(UserError, match=r"a\.jsonl:4 \(source sums\): the conversation has no assistant turn"):
        encoder(({"messages": [USER]}, "a.jsonl:4"))
