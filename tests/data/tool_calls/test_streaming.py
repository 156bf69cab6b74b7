"""An answer in pieces is the whole answer, and comes early."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.tool_calls import FORMATS, parser
from ptf.data.tool_calls.protocol import Format, ParsedAnswer
from tests.data.tool_calls.sampled_texts import FRAGMENTS, sampled
from tests.data.tool_calls.streamed import StreamedAnswer

Tools = Sequence[Mapping[str, Any]] | None


def streamed(form: Format, pieces: list[str], tools: Tools) -> ParsedAnswer:
    answer = StreamedAnswer(form, tools)
    content = "".join(answer.feed(piece) for piece in pieces)
    rest, calls = answer.finish()
    return ParsedAnswer(content + rest or None, calls)


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("name", FORMATS)
def test_however_a_text_is_split_the_result_is_that_of_the_whole(name):
    pieces = st.lists(st.sampled_from([*FRAGMENTS[name], " ", "\n", "f", "é"]) | st.text(max_size=3), max_size=12)
    texts = st.integers(0, 10**6).map(lambda seed: sampled(name, seed)[:2]) | pieces.map(lambda p: ("".join(p), None))

    @settings(max_examples=60)
    @given(texts, st.lists(st.integers(0, 10**4), max_size=8))
    def holds(sample, cuts):
        text, tools = sample
        whole = parser(name).parse(text, tools)
        assert streamed(parser(name), split(text, cuts), tools) == whole
        assert streamed(parser(name), list(text[-200:]), tools) == parser(name).parse(text[-200:], tools)

    holds()


@pytest.mark.parametrize("name", FORMATS)
def test_content_comes_before_the_end(name):
    answer = StreamedAnswer(parser(name))
    assert answer.feed("Hello, ") + answer.feed("world.") == "Hello, world."
    assert answer.finish() == ("", ())


@pytest.mark.parametrize(
    ("name", "text", "certain"),
    [
        ("hermes", "Hi <tool_ca", "Hi "),
        ("hermes", "Hi <tool_cat", "Hi <tool_cat"),
        ("hermes", "Hi <tool_call>{", "Hi "),
        ("qwen3_coder", "Hi \n", "Hi"),  # stripped if a call follows
        ("qwen3_coder", " Hi", ""),
        ("glm45", "Hi <tool_call>", "Hi"),
        ("mistral", "Hi [TOOL", "Hi"),
        ("llama3_json", "Hi {", "Hi "),
        ("llama3_json", "\n", ""),
        ("llama4_pythonic", "Hi [", "Hi ["),
        ("llama4_pythonic", "[", ""),
        ("llama4_pythonic", "<|python_s", ""),
        ("llama4_pythonic", "<|python_start|>Hi <|pyt", "Hi "),
    ],
)
def test_what_may_begin_a_call_waits(name, text, certain):
    assert parser(name).certain(text) == certain


def test_a_format_that_is_certain_too_early_is_caught():
    class Hasty:
        def parse(self, text: str, tools: Tools) -> ParsedAnswer:
            return parser("hermes").parse(text, tools)

        def certain(self, text: str) -> str:
            return text

    text = 'Hi <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert streamed(Hasty(), list(text), None) != parser("hermes").parse(text, None)
