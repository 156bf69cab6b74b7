import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ptf.data.growing import GrowingText
from ptf.data.tokenizer import Tokenizer
from tests.data.templates import ONE_SAMPLE, SPLIT, templated


@given(st.lists(st.lists(st.sampled_from(["a", "1", "=", "<|im_end|>", "<|pad|>", "<|user|>"])).map("".join), max_size=8))
def test_any_texts_one_after_the_other(characters: Tokenizer, texts: list[str]) -> None:
    growing = GrowingText(characters)
    for text in texts:
        assert growing.encode(text) == characters.encode(text)


@pytest.mark.parametrize("template", [*ONE_SAMPLE, *SPLIT])
def test_real_conversations_turn_by_turn(shared: Path, template: str) -> None:
    tokenizer = templated(shared, template)
    with gzip.open(shared / "chat/oasst_en100_paths.jsonl.gz") as lines:
        conversations = [json.loads(line)["messages"] for line in itertools.islice(lines, 15)]
    growing = GrowingText(tokenizer)
    assert tokenizer.cuts
    for messages in conversations:
        for n in range(1, len(messages) + 1):
            for prompt in (True, False):
                text = tokenizer.render_text(messages[:n], prompt)
                assert growing.encode(text) == tokenizer.encode(text)


def test_it_saves_what_it_says(characters: Tokenizer) -> None:
    """The tokenizer sees each turn about once: what it is given grows with the conversation, not with its square."""
    seen = 0

    class Counting(Tokenizer):
        def encode(self, text: str) -> list[int]:
            nonlocal seen
            seen += len(text)
            return super().encode(text)

    growing = GrowingText(Counting(characters.hf))
    text = ""
    for _ in range(100):
        text += "1" * 40 + "<|im_end|>"
        growing.encode(text)
    assert seen < 3 * len(text)


def test_a_tokenizer_in_which_nothing_cuts_is_found_out(tmp_path: Path) -> None:
    """Here the end of turn is an ordinary merge that swallows what is before it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    vocab = {token: i for i, token in enumerate(["a", "b", "c", ";", "c;"])}
    hf = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE(vocab=vocab, merges=[("c", ";")])))
    hf.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = Tokenizer(hf, extra_stops=[vocab[";"]])
    assert tokenizer.cuts == {}
    growing = GrowingText(tokenizer)
    for text in ("abc;", "abc;a", "ab;abc;"):
        assert growing.encode(text) == tokenizer.encode(text)
