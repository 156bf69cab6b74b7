"""Hermes: JSON between tags."""

import pytest

from ptf.data.tool_calls import ToolCall, parser
from tests.data.tool_calls.tables import found

F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", None, []),
        ("no call", "no call", []),
        (F, None, [("f", {"x": 1})]),
        (f"Sure. \n{F}", "Sure. \n", [("f", {"x": 1})]),
        (f"{F}\n{F} done", None, [("f", {"x": 1})] * 2),
        ('<tool_call>{"name": "f", "arguments": {}}', None, [("f", {})]),  # no end tag, but complete
        (
            '<tool_call>{"arguments": {"s": "å\\n\\"q\\" 東"}, "name": "f"}</tool_call>',
            None,
            [("f", {"s": 'å\n"q" 東'})],
        ),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, [("f", [1])]),  # passed on
    ],
)
def test_calls(text, content, calls):
    assert found("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"x": 1',
        '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call></tool_call>",
        f"{F}<tool_call>broken</tool_call>",  # all calls, or none
        '<tool_call>{"name": "f", "arguments": ' + "[" * 5_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text):
    assert found("hermes", text) == (text, [])


def test_arguments_can_be_encoded():
    text = '<tool_call>{"name": "f", "arguments": {"s": "é \\ud83c\\udf26 \\ud800"}}</tool_call>'
    assert parser("hermes").parse(text, None).tool_calls == (ToolCall("f", '{"s": "\\u00e9 \\ud83c\\udf26 \\ud800"}'),)
    assert parser("hermes").parse(text.replace("\\ud800", ""), None).tool_calls == (ToolCall("f", '{"s": "é 🌦 "}'),)
