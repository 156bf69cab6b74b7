from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptf.data.document import Document
from ptf.data.encode import (
    Encoder,
    encode_document,
    encode_preference,
    encode_prompt,
    encode_scored,
    limit_length,
    shaped,
)
from ptf.data.quarantine import Quarantine, rows_in
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.read_form import at
from tests.data.templates import bytes_tokenizer

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}


def test_a_chat_row_is_a_unit(characters: Tokenizer) -> None:
    ((sample,),) = encode_document({"messages": [USER, ASSISTANT]}, characters, "sums")
    assert characters.decode(sample.tokens) == "<|im_start|><|user|>1+1=<|im_end|><|im_start|><|assistant|>2<|im_end|>"
    assert characters.decode(sample.tokens[sample.loss_weights > 0]) == "2<|im_end|>"
    assert (sample.source, sample.tokens.dtype, sample.loss_weights.dtype) == ("sums", np.int32, np.float32)


@pytest.mark.parametrize("row", [{"messages": [USER], "answer": "2"}, {"prompt": "1+1=", "answer": "2"}])
def test_a_prompt_row_ends_where_the_model_speaks(characters: Tokenizer, row: dict[str, Any]) -> None:
    prompt = encode_prompt(row, characters, "sums", 7)
    assert characters.decode(prompt.tokens) == "<|im_start|><|user|>1+1=<|im_end|><|im_start|><|assistant|>"
    assert (prompt.row, prompt.source, prompt.index) == (row, "sums", 7)  # all columns are there for the reward


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, ASSISTANT]}, "must end before the response"),
        ({"question": "1+1="}, r"needs `messages` or a string `prompt`, this one has \['question'\]"),
    ],
)
def test_bad_prompts_are_refused(characters: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode_prompt(row, characters, "sums", 0)


def sample(n: int, trained: int) -> Document:
    return Document(
        np.arange(n, dtype=np.int32),
        (np.arange(n) >= n - trained).astype(np.float32),
        "",
        {"advantages": np.arange(n, dtype=np.float32)},
    )


def test_what_is_too_long_is_refused_dropped_or_cut() -> None:
    unit = (sample(10, 6),)
    assert limit_length(unit, 10, "error")[0] is unit
    with pytest.raises(UserError, match=r"10 tokens do not fit data\.seq_len 8: raise it, or set data\.too_long"):
        limit_length(unit, 8, "error")
    assert limit_length(unit, 8, "drop") == []
    (((cut,)),) = limit_length(unit, 8, "truncate")
    assert cut.tokens.tolist() == cut.token_columns["advantages"].tolist() == list(range(8))
    assert cut.loss_weights.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert limit_length(unit, 4, "truncate") == []  # nothing that is trained is left
    (pair,) = limit_length((sample(10, 8), sample(4, 3)), 8, "truncate")
    assert [len(s) for s in pair] == [4, 4]
    # of 3, 3, 3 and 1 tokens: the first two train nothing, nor can the last, which nothing precedes
    pieces = limit_length((sample(10, 4),), 3, "split")
    assert [s.tokens.tolist() for (s,) in pieces] == [[6, 7, 8]]
    with pytest.raises(UserError, match="2 samples that belong together cannot be split"):
        limit_length((sample(10, 8), sample(4, 3)), 8, "split")


def test_the_encoder_counts_and_names_the_row(characters: Tokenizer) -> None:
    long = {"role": "assistant", "content": "2" * 30}
    encoder = Encoder(lambda row, name: encode_document(row, characters, name), "sums", SourceSpec(""), 20, "truncate")
    for line, messages in enumerate([[USER, ASSISTANT], [USER, long], [USER | {"content": "1" * 30}, ASSISTANT]], 1):
        encoder(at({"messages": messages}, line))
    assert encoder.counts == {
        "rows": 3,
        "samples": 2,
        "tokens": 31,
        "trained": 2 + 11,
        "whole": 31,
        "too_long": 1,
        "truncated": 1,
        "bad": 0,
        "rows_without_samples": 1,
    }
    with pytest.raises(UserError, match=r"a\.jsonl:4 \(source sums\): the conversation has no assistant turn"):
        encoder(at({"messages": [USER]}, 4))


def said(tokenizer: Tokenizer, sample: Document) -> tuple[str, str]:
    """All of a sample, and what of it is trained."""
    return tokenizer.decode(sample.tokens), tokenizer.decode(sample.tokens[sample.loss_weights > 0])


HEAD, ANSWER = "<|im_start|><|user|>1+1=<|im_end|><|im_start|><|assistant|>", "2<|im_end|>"


@pytest.mark.parametrize(
    ("row", "whole", "trained"),
    [
        ({"prompt": "1+1=", "completion": "2"}, HEAD + ANSWER, ANSWER),
        ({"prompt": [USER], "completion": [ASSISTANT]}, HEAD + ANSWER, ANSWER),
        ({"prompt": [USER], "completion": ASSISTANT}, HEAD + ANSWER, ANSWER),
        ({"text": "1+1=2"}, "1+1=2<|im_end|>", "+1=2<|im_end|>"),
        ({"events": ["ab", "c", "de"]}, "abcde", "cde"),
        ({"events": ["a", "b", "c"], "context": 2}, "abc", "c"),
        ({"events": ["a", "b"], "context": 0}, "ab", "b"),
    ],
)
def test_a_row_is_what_its_columns_say(characters: Tokenizer, row: dict[str, Any], whole: str, trained: str) -> None:
    ((sample,),) = encode_document(row, characters, "s")
    assert said(characters, sample) == (whole, trained)
    assert (sample.tokens.dtype, sample.loss_weights.dtype, sample.source) == (np.int32, np.float32, "s")


def test_without_a_template_a_prompt_is_plain_text() -> None:
    plain = Tokenizer(bytes_tokenizer())
    ((sample,),) = encode_document({"prompt": "The capital of France is", "completion": " Paris"}, plain)
    assert said(plain, sample) == ("The capital of France is Paris<|endoftext|>", " Paris<|endoftext|>")
    assert len(plain.encode("name")) == 1
    # "name" is one token, but "na" is what is served
    ((sample,),) = encode_document({"prompt": "na", "completion": "me"}, plain)
    assert sample.tokens.tolist() == [*plain.encode("na"), *plain.encode("me"), plain.hf.eos_token_id]


def test_a_preference_is_a_pair(characters: Tokenizer) -> None:
    worse = {"role": "assistant", "content": "3"}
    for row in (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": ASSISTANT, "rejected": [worse]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, worse]},
    ):
        ((chosen, rejected),) = encode_preference(row, characters, "s")
        assert said(characters, chosen) == (HEAD + ANSWER, ANSWER)
        assert said(characters, rejected) == (HEAD + "3<|im_end|>", "3<|im_end|>")
    ((chosen, _),) = encode_preference({"prompt": [USER, ASSISTANT, USER], "chosen": "2", "rejected": "3"}, characters)
    assert said(characters, chosen)[1] == ANSWER  # of the last turn only


def test_a_scored_answer_carries_its_score_at_its_end(characters: Tokenizer) -> None:
    ((sample,),) = encode_scored({"prompt": "1+1=", "completion": "2", "reward": 0.5}, characters)
    assert said(characters, sample) == (HEAD + ANSWER, "<|im_end|>")
    assert sample.token_columns["score"].tolist() == [0.0] * (len(sample) - 1) + [0.5]
    assert sample.token_columns["answer_length"][-1] == len(characters.encode(ANSWER))
    messages = [USER, ASSISTANT | {"reward": 0.5}]
    assert encode_scored({"messages": messages}, characters)[0][0].tokens.tolist() == sample.tokens.tolist()
    unrated = [USER, ASSISTANT, USER, ASSISTANT | {"reward": 0.0}, USER, ASSISTANT | {"reward": None}]
    ((sample,),) = encode_scored({"messages": unrated}, characters)
    assert said(characters, sample)[0].endswith(ANSWER), "nothing after the last that was judged is read"
    assert np.flatnonzero(sample.loss_weights).tolist() == [len(sample) - 1], "0 is a reward, and none is none"


def test_of_a_long_conversation_what_fits_is_scored(characters: Tokenizer) -> None:
    """As it would be if every answer were a row of its own."""
    messages = [m for i in range(6) for m in (USER, ASSISTANT | {"reward": i / 10})]
    (whole,) = encode_scored({"messages": messages}, characters)
    assert limit_length(whole, len(whole[0]), "drop") == [whole]
    ((five,),) = limit_length(whole, len(whole[0]) - 1, "drop")
    assert five.token_columns["score"][five.loss_weights != 0].tolist() == pytest.approx([i / 10 for i in range(5)])
    assert said(characters, five)[0].endswith(ANSWER)
    assert limit_length(whole, 3, "drop") == []
    with pytest.raises(UserError, match="do not fit data"):
        limit_length(whole, len(whole[0]) - 1, "error")


def test_a_scored_row_may_be_a_conversation() -> None:
    row = {"messages": [USER, ASSISTANT | {"reward": 1}], "text": "x"}
    assert shaped(row, {}, "scored") == {"messages": row["messages"]}
    with pytest.raises(UserError, match="a row of kind scored needs `prompt` and `completion` and `reward`"):
        shaped({"text": "x"}, {}, "scored")


@pytest.mark.parametrize(
    ("encode", "row", "message"),
    [
        (
            encode_document,
            {"question": "1"},
            r"needs `messages`, `prompt` and `completion`, `text`, or `events`; this one has \['question'\]",
        ),
        (encode_document, {"prompt": "1", "completion": 2}, "a response must be a string or messages"),
        (
            encode_document,
            {"prompt": {"a": 1}, "completion": "2"},
            "a prompt must be a string or a list of messages, not dict",
        ),
        (encode_document, {"prompt": [USER], "completion": [USER]}, "must end with a message of the assistant's"),
        (encode_document, {"text": ""}, "`text` must be a string, and not empty"),
        (
            encode_document,
            {"events": ["a", ""]},
            "`events` must be a list of strings and of lists of strings, none of them empty",
        ),
        (encode_document, {"events": ["a", "b"], "context": 2}, "`context` must be a number of events below 2"),
        (encode_document, {"events": ["a"], "context": 0}, "nothing to train: one token"),
        (encode_scored, {"prompt": "1", "completion": "2", "reward": 1e39}, "`reward` must be a finite number"),
        (encode_scored, {"prompt": "1", "completion": "2", "reward": 10**400}, "`reward` must be a finite number"),
    ],
)
def test_bad_rows_are_refused(characters: Tokenizer, encode: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(row, characters)


def test_columns_have_names_of_their_own_and_kinds_choose(characters: Tokenizer) -> None:
    row = {"question": "1+1=", "answer": "2", "text": "3", "n": 1}
    assert shaped(row, {"prompt": "question", "completion": "answer"}) == {
        "prompt": "1+1=",
        "completion": "2",
        "text": "3",
        "n": 1,
    }
    assert shaped(row, {"prompt": "question", "completion": "answer"}, "text") == {"text": "3", "n": 1}
    assert shaped(row | {"messages": []}, {"prompt": "question", "completion": "answer"}, "completion") == {
        "prompt": "1+1=",
        "completion": "2",
        "n": 1,
    }
    pair = {"prompt": "1", "chosen": "2", "rejected": "3", "completion": "2"}
    assert shaped(pair, {}, "preference") == {"prompt": "1", "chosen": "2", "rejected": "3"}
    with pytest.raises(
        UserError, match=r"there is no column 'questoin'; this row has \['answer', 'n', 'question', 'text'\]"
    ):
        shaped(row, {"prompt": "questoin"})
    with pytest.raises(UserError, match="a row of kind chat needs `messages`"):
        shaped(row, {}, "chat")
    encoder = Encoder(
        lambda row, name: encode_document(row, characters, name),
        "s",
        SourceSpec("", columns={"prompt": "question", "completion": "answer"}),
        99,
        "error",
    )
    ((sample,),) = encoder(at({"question": "1+1=", "answer": "2", "weight": 0.25}, 1))
    assert said(characters, sample) == (HEAD + ANSWER, ANSWER)
    assert set(sample.loss_weights.tolist()) == {0.0, 0.25}
    for weight in (0, -1, "a", float("inf")):
        with pytest.raises(UserError, match=r"a\.jsonl:2 \(source s\): the row's `weight` must be a number above 0"):
            encoder(at({"question": "1+1=", "answer": "2", "weight": weight}, 2))


def test_bad_rows_are_set_aside_once_and_not_too_many(characters: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "bad.jsonl"

    def run(rows: list[dict[str, Any]]) -> Encoder:
        aside = Quarantine(file, 0.002)
        encoder = Encoder(
            lambda row, name: encode_document(row, characters, name),
            "s",
            SourceSpec(""),
            20,
            "error",
            set_aside=aside.add,
        )
        for i, row in enumerate(rows, 1):
            encoder(at(row, i))
        return encoder

    good, bad = {"text": "1+1=2"}, {"text": 1}
    assert run([good, bad, good, {"text": "1" * 30}]).counts == {
        "rows": 4,
        "samples": 2,
        "tokens": 12,
        "trained": 10,
        "whole": 12,
        "too_long": 0,
        "truncated": 0,
        "bad": 2,
        "rows_without_samples": 2,
    }
    noted = [(row.where, row.reason[:20]) for row in rows_in(file)]
    assert noted == [("a.jsonl:2", "`text` must be a str"), ("a.jsonl:4", "31 tokens do not fit")]
    with file.open("a") as out:
        out.write('{"where": "a.jso')  # a kill cut this off
    run([good, bad, bad])
    assert [row.where for row in rows_in(file)] == ["a.jsonl:2", "a.jsonl:4", "a.jsonl:3"]
    with pytest.raises(
        UserError,
        match=r"3 of 3 rows are bad, more than data\.max_bad_rows_share \(0\.002\) allows; the last is a\.jsonl:3",
    ):
        run([bad] * 10_000)
