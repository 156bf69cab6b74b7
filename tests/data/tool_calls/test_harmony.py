"""Harmony: texts of a grammar are read as what they were made of, and conversations of the published template too."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.tool_calls import ParsedAnswer, ToolCall, parser
from ptf.data.tool_calls.harmony import divide, messages
from tests.data.tool_calls.streamed import StreamedAnswer

HARMONY = parser("harmony")
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
WORDS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<|>= \n"), max_size=12).filter(
    lambda text: not any(mark in text for mark in MARKS)
)
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.none() | st.lists(st.booleans()), max_size=2)


@st.composite
def answers(draw) -> tuple[str, list[str], str, list[tuple[str, Any]]]:
    """Return an answer with its thoughts, its content and its calls: thoughts and preambles, then calls or the final
    message."""
    thoughts, content, calls, parts = list[str](), "", [], list[str]()
    for channel in draw(st.lists(st.sampled_from(["analysis", "commentary"]), max_size=3)):
        text = draw(WORDS)
        parts.append(f"<|channel|>{channel}<|message|>{text}<|end|>")
        thoughts += [text] if channel == "analysis" else []
        content += text if channel == "commentary" else ""
    for name, arguments in draw(st.lists(st.tuples(st.sampled_from(["f", "get.x", "a-b_2"]), ARGUMENTS), max_size=2)):
        kind = draw(st.sampled_from(["", " json", " <|constrain|>json"]))
        to, channel = f"to=functions.{name}", f"<|channel|>{draw(st.sampled_from(['commentary', 'analysis']))}"
        header = draw(st.sampled_from([f" {to}{channel}{kind}", f"{channel} {to}{kind}"]))
        parts.append(f"{header}<|message|>{json.dumps(arguments)}<|call|>")
        calls.append((name, arguments))
    if not calls:
        text = draw(WORDS)
        parts.append(f"<|channel|>final<|message|>{text}")
        content += text
    else:
        parts[-1] = parts[-1].removesuffix("<|call|>")  # the token that ends the turn is not in the text
    return "<|start|>assistant".join(parts), thoughts, content, calls


@given(answers(), st.data())
def test_an_answer_of_the_grammar_is_what_it_was_made_of(made, data):
    text, thoughts, content, calls = made
    thinking, body = divide(text, ended=True)
    assert thinking == ("\n".join(thoughts) if thoughts else None)
    for whole in (text, body):
        found = HARMONY.parse(whole, None)
        assert (found.content or "") == content
        assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls
    cut = data.draw(st.integers(0, len(text)))
    begun, known = divide(text[:cut], ended=False)
    assert (thinking or "").startswith(begun or "")
    assert content.startswith(HARMONY.certain(known or ""))
    answer = StreamedAnswer(HARMONY)
    early = answer.feed(text[:cut]) + answer.feed(text[cut:])
    rest, _ = answer.finish()
    assert early + rest == content


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text", "plain text", []),
        ("to=5 or more", "to=5 or more", []),
        ("<|channel|>final<|message|>", None, []),
        ("<|channel|>final<|message|>a <|cha", "a <|cha", []),
        ("<|channel|>analysis<|message|>never ends", None, []),
        ("<|channel|>commentary to=functions.f<|message|>{}", None, [("f", "{}")]),
        ("<|channel|>commentary to=browser.search<|message|>{}", None, [("browser.search", "{}")]),
        ("<|channel|>commentary to=assistant<|message|>a", "a", []),
        ("said<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}", "said", [("f", "{}")]),
        (" to=functions.f<|message|>{}<|call|> junk", None, [("f", "{}")]),
        ("<|channel|>final<|message|>a<|return|>", "a", []),
    ],
)
def test_odd_answers(text, content, calls):
    found = HARMONY.parse(text, None)
    assert (found.content, list(found.tool_calls)) == (content, [ToolCall(*call) for call in calls])


@pytest.mark.parametrize("arguments", ["{", "", "{'a': 1}", '{"a": NaN}', "print(1)"])
def test_a_call_without_json_is_content(arguments):
    text = f"<|channel|>commentary to=functions.f<|message|>{arguments}"
    assert HARMONY.parse(text, None) == ParsedAnswer(text, ())


def test_conversations_of_the_published_template_are_read(shared):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (shared / "templates/gpt-oss.jinja").read_text()
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["x", None]}}}
    conversation: list[Any] = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "thinking": "I add.", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    final = {"role": "assistant", "thinking": "Now I know.", "content": "It is 3."}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}]

    def said(messages, marker):
        text = render_jinja_template([messages], tools=tools, chat_template=template)[0][0]
        return text.partition("<|end|><|start|>assistant" if marker else "\x00")[2] or text

    first = said(conversation, marker=True).rpartition("<|call|>")[0]
    assert divide(first, ended=True)[0] == "I add."
    assert HARMONY.parse(first, tools).tool_calls == (ToolCall("add", '{"a": 1, "b": ["x", null]}'),)
    assert HARMONY.parse(first, tools).content is None
    whole = said([*conversation, final], marker=False)
    last = whole[whole.rindex("<|start|>functions.add") :].partition("<|start|>assistant")[2].removesuffix("<|return|>")
    assert divide(last, ended=True) == ("Now I know.", "It is 3.")


def test_a_reader_that_takes_calls_for_content_is_caught():
    text = "<|channel|>commentary to=functions.f<|message|>{}"
    assert [message.recipient for message in messages(text)] == ["functions.f"]
    assert [message.recipient for message in messages(text.replace("to=functions.f", ""))] == [None]  # the control


def test_plain_text_is_closed_where_a_message_follows_it():
    assert [(m.channel, m.text, m.closed) for m in messages("plain")] == [("final", "plain", False)]
    first, second = messages("plain<|start|>assistant<|channel|>final<|message|>b<|end|>")
    assert (first.text, first.closed) == ("plain", True)
    assert (second.text, second.closed) == ("b", True)


@pytest.mark.parametrize(
    ("begun", "known"),
    [
        ("", (None, None)),
        (" <|chan", (None, None)),  # may become a header
        ("to", (None, None)),
        ("to=functions.add", (None, None)),
        ("Hel", (None, "Hel")),  # plain text
        ("<|channel|>analysis<|message|>hm", ("hm", "")),
        ("<|channel|>analysis<|message|>hm<|en", ("hm", "")),  # of a mark
        ("<|channel|>final<|message|>Yes", (None, "Yes")),
    ],
)
def test_what_is_known_of_the_beginning_of_a_response(begun, known):
    assert divide(begun, ended=False) == known


def test_what_is_known_only_grows():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes, I do."
    whole = divide(text, ended=True)
    assert whole == ("hm", "Yes, I do.")
    before = ("", "")
    for n in range(len(text) + 1):
        thinking, content = divide(text[:n], ended=False)
        now = (thinking or "", content or "")
        assert all(one.startswith(other) for one, other in zip(now, before, strict=True)), text[:n]
        before = now
    assert before == whole
