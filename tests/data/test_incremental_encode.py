import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.incremental_encode import encode_incrementally
from ptf.data.tokenizer import Tokenizer
from tests.data.conversations import said
from tests.data.templates import ONE_SAMPLE, SPLIT, templated

SAID = ("a\n\nb ", " 数学 é", "\n", "<|im_end|>", "the weather is 3.14")


@given(
    st.lists(st.lists(st.sampled_from(["a", "1", "=", "<|im_end|>", "<|pad|>", "<|user|>"])).map("".join), max_size=8)
)
def test_any_texts_one_after_the_other(characters: Tokenizer, texts: list[str]) -> None:
    assert encode_incrementally(texts, characters) == [characters.encode(text) for text in texts]


def all_renders(tokenizer: Tokenizer, conversations: list[list[dict[str, Any]]]) -> list[str]:
    return [
        tokenizer.render_text(m[:n], prompt)
        for m in conversations
        for n in range(1, len(m) + 1)
        for prompt in (True, False)
    ]


@pytest.mark.parametrize(
    "template", ["plain", "drops_thinking", "next_role_stop", "closed_by_next", "two_stops", "only_end_of_document"]
)
def test_conversations_turn_by_turn(template: str) -> None:
    tokenizer = templated(template)
    made = [
        [said("assistant" if i % 2 else "user", text) for i, text in enumerate((a, b, a + "\n\n", b))]
        for a, b in itertools.permutations(SAID, 2)
    ]
    assert tokenizer.cuts
    texts = all_renders(tokenizer, made)
    assert encode_incrementally(texts, tokenizer) == [tokenizer.encode(text) for text in texts]


@pytest.mark.long
def test_real_conversations_turn_by_turn(shared: Path) -> None:
    with gzip.open(shared / "chat/oasst_en100_paths.jsonl.gz") as lines:
        conversations = [json.loads(line)["messages"] for line in itertools.islice(lines, 15)]
    for template in (*ONE_SAMPLE, *SPLIT):
        tokenizer = templated(template, shared)
        assert tokenizer.cuts
        texts = all_renders(tokenizer, conversations)
        assert encode_incrementally(texts, tokenizer) == [tokenizer.encode(text) for text in texts]


def test_it_saves_what_it_says(characters: Tokenizer) -> None:
    """The tokenizer sees each turn about once, and all in one call: what it is given grows with the conversation,
    not with its square."""
    calls = []

    class Counting(Tokenizer):
        def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
            calls.append(sum(map(len, texts)))
            return super().encode_all(texts)

    texts = ["1" * 40 + "<|im_end|>"]
    while len(texts) < 100:
        texts.append(texts[-1] + texts[0])
    encode_incrementally(texts, Counting(characters.hf))
    assert len(calls) == 1
    assert calls[0] < 3 * len(texts[-1])


def test_what_conversations_share_is_encoded_once(characters: Tokenizer) -> None:
    """A long system message that the conversation before had, too, is not given to the tokenizer again."""
    given_to = []

    class Counting(Tokenizer):
        def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
            given_to.append(sum(map(len, texts)))
            return super().encode_all(texts)

    tokenizer = Counting(characters.hf)
    asked = [f"{'1' * 400}<|im_end|>{n}+1=<|im_end|>" for n in range(3)]
    assert [encode_incrementally([text], tokenizer)[0] for text in asked] == [characters.encode(text) for text in asked]
    assert given_to[0] > 400
    assert max(given_to[1:]) < 40


def test_what_was_encoded_is_forgotten_with_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("1+=", tmp_path)
    text = "1+1=<|im_end|>1"
    before = encode_incrementally([text], tokenizer)
    tokenizer.add(["1+1="])
    assert encode_incrementally([text], tokenizer) == [tokenizer.encode(text)] != before


def test_a_tokenizer_in_which_nothing_cuts_is_found_out(tmp_path: Path) -> None:
    """Here the end of turn is an ordinary merge that swallows what is before it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    vocab = {token: i for i, token in enumerate(["a", "b", "c", ";", "c;"])}
    hf = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE(vocab=vocab, merges=[("c", ";")])))
    hf.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = Tokenizer(hf, extra_stops=[vocab[";"]])
    assert tokenizer.cuts == {}
    texts = ["abc;", "abc;a", "ab;abc;"]
    assert encode_incrementally(texts, tokenizer) == [tokenizer.encode(text) for text in texts]
