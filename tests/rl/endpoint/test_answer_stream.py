"""However an answer's tokens arrive, its pieces add up to the whole answer."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptf.data.tool_calls import FORMATS
from ptf.data.trajectory import Generation
from ptf.rl.endpoint.answer_stream import AnswerStream
from tests.data.templates import templated

PIECES = (
    "<think>",
    "</think>",
    "\n",
    "\n\n",
    " ",
    "END",
    "EN",
    "D",
    "yes",
    "日本",
    "👩‍👧",
    "é",
    "\ufffd",
    "<",
    "<tool_",
)
CALLS = ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<tool_call>", "</tool_call>", '{"name": "f"}')
TEXTS = st.lists(st.sampled_from((*PIECES, *CALLS)), max_size=8).map("".join)
STOPS = st.lists(st.sampled_from(("END", "D", "日", "\n\n", "yes", "</think>", "<", "👩")), max_size=2, unique=True)
PLAIN = templated("plain")


def check(tokenizer, ids, stops, opened, form, bursts, finished=True, divide=None):
    """Feed the tokens as an exchange does; return the parts."""
    stream = AnswerStream(tokenizer, form, None, stops, opened, divide)
    thinking, content, fed = "", "", []
    for i, token in enumerate(ids):
        fed.append(token)
        stream.feed(token)
        if stream.stopped:
            finished = False
            break
        if bursts[i % len(bursts)]:
            new = stream.new_parts()
            thinking, content = thinking + new[0], content + new[1]
    stopped = stream.stopped
    if finished and not stopped:
        fed.append(tokenizer.stop_ids[0])
        stream.feed(fed[-1])
    n = len(fed)
    empty = np.zeros(0, np.int32)
    generation = Generation(empty, np.array(fed, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), finished)
    parts = stream.whole(generation)
    rest = stream.rest_of(parts.thinking or "", parts.content or "")
    assert thinking + rest[0] == (parts.thinking or "")
    assert content + rest[1] == (parts.content or "")
    return parts, stopped


def split(tokenizer, text, sizes):
    """Encode a text in pieces, so that its ids are not those of the whole."""
    ids, at, i = [], 0, 0
    while at < len(text):
        ids += tokenizer.encode(text[at : at + sizes[i % len(sizes)]])
        at += sizes[i % len(sizes)]
        i += 1
    return [token for token in ids if token not in tokenizer.stop_ids]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
BURSTS = st.lists(st.booleans(), min_size=1, max_size=4)
FORM = st.sampled_from((None, "hermes", "qwen3_coder", "glm45"))
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(TEXTS, STOPS, st.booleans(), FORM, SIZES, BURSTS, st.booleans())
@QUICK
def test_pieces_add_up_with_a_byte_level_tokenizer(text, stops, opened, form, sizes, bursts, finished):
    made, ids = FORMATS[form] if form else None, split(PLAIN, text, sizes)
    parts, stopped = check(PLAIN, ids, stops, opened, made, bursts, finished)
    shown = PLAIN.decode(ids)
    assert stopped == any(stop in shown for stop in stops) or "\ufffd" in shown
    if not stops and not opened and form is None and not shown.lstrip().startswith("<think>"):
        assert (parts.content or "") == shown


@given(st.lists(st.integers(0, 600), max_size=24), STOPS, st.booleans(), BURSTS)
@QUICK
def test_pieces_add_up_of_any_tokens(ids, stops, opened, bursts):
    """Also of characters that are cut, and of bytes that are none."""
    ids = [token for token in ids if token not in PLAIN.stop_ids]
    check(PLAIN, ids, stops, opened, FORMATS["hermes"], bursts)


@pytest.mark.parametrize("name", ["own/phi3-mini", "qwen3"])
def test_pieces_add_up_with_tokenizers_of_models(shared, name):
    """One of them with bytes as tokens and a space before the first word."""
    tokenizer = templated(name, shared)

    @given(TEXTS, STOPS, st.booleans(), SIZES, BURSTS, st.lists(st.integers(3, 30000), max_size=6))
    @settings(QUICK, max_examples=40)
    def adds_up(text, stops, opened, sizes, bursts, more):
        ids = [*split(tokenizer, text, sizes), *(token for token in more if token not in tokenizer.stop_ids)]
        check(tokenizer, ids, stops, opened, FORMATS["hermes"], bursts)

    adds_up()


def test_white_space_before_thinking_is_no_content():
    parts, _ = check(PLAIN, PLAIN.encode("\n<think>\na\n</think>\n\nbcd"), (), False, None, [True])
    assert (parts.thinking, parts.content) == ("a", "bcd")


def test_a_stream_that_sends_too_early_is_caught(monkeypatch):
    """Negative control: what may be the beginning of a stop string is not held back."""
    monkeypatch.setattr(AnswerStream, "_held_back", lambda self: 0)
    with pytest.raises(AssertionError):
        check(PLAIN, PLAIN.encode("a") + PLAIN.encode("EN") + PLAIN.encode("D"), ("END",), False, None, [True])


HARMONY = st.lists(
    st.sampled_from(
        (
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
            "<|start|>assistant",
            "<|end|>",
            '{"a": 1}',
            "to=",
            *PIECES,
        )
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(HARMONY, STOPS, st.lists(st.booleans(), min_size=1, max_size=5))
def test_channels_add_up_to_the_whole_answer(text, stops, bursts):
    form = FORMATS["harmony"]
    check(PLAIN, PLAIN.encode(text), stops, False, form, bursts, divide=form.divide)


def test_channels_are_thinking_content_and_calls():
    text = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary<|message|>See:<|end|>"
    text += '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    form = FORMATS["harmony"]
    parts, _ = check(PLAIN, PLAIN.encode(text), [], False, form, [True], divide=form.divide)
    assert (parts.thinking, parts.content) == ("I add.", "See:")
    assert [(call.name, call.arguments) for call in parts.tool_calls] == [("f", '{"a": 1}')]
    parts, _ = check(PLAIN, PLAIN.encode(text), [], False, form, [True])  # the control: nothing divides it
    assert parts.thinking is None


def test_a_stop_string_is_complete_though_its_token_begins_another_character():
    ids = [535, 55, 241, 477, 321]  # the last has the end of the string and bytes of no character
    assert PLAIN.decode(ids).endswith("👩\ufffd")
    stream = AnswerStream(PLAIN, None, None, ["👩"], False)
    for token in ids:
        assert not stream.stopped
        stream.feed(token)
    assert stream.stopped
    unending = AnswerStream(PLAIN, None, None, ["👩👩"], False)
    for token in [*ids, *ids]:
        unending.feed(token)
    assert not unending.stopped
