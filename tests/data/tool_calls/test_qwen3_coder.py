"""Qwen3-Coder: functions and parameters as tags."""

import pytest

from tests.data.tool_calls.tables import TOOLS, found

F = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (F, None, [("f", {"n": 1})]),
        (f" Sure. \n{F}\n{F} done", "Sure.", [("f", {"n": 1})] * 2),
        ("<function=f></function>", None, [("f", {})]),
        ("<function=f</function>", None, [("f", {})]),
        ("<function=f><parameter=s>\n\n a\nb \n\n</parameter></function>", None, [("f", {"s": "\n a\nb \n"})]),
        ("<function=f><parameter=s>a < b > c & <b></parameter></function>", None, [("f", {"s": "a < b > c & <b>"})]),
        ("<function=f>< parameter = n >1</ parameter></function>", None, [("f", {"n ": "1"})]),
        (
            "<function=g><parameter=n>1</parameter></function>",
            None,
            [("g", {"n": "1"})],
        ),  # an unknown tool has no types
        ("<think>Hm.</think> Hi" + F, "<think>Hm.</think> Hi", [("f", {"n": 1})]),
        # values without an end tag
        ("<function=f><parameter=n>1<parameter=s>a</function>", None, [("f", {"n": 1, "s": "a"})]),
        ("<function=f><parameter=n>1\n</tool_call>" + F, None, [("f", {"n": 1}), ("f", {"n": 1})]),
        # functions without an end tag
        ("<tool_call><function=f><parameter=n>1</parameter></tool_call> x " + F, None, [("f", {"n": 1})] * 2),
        ("<function=f><parameter=n>1</parameter>\n", None, [("f", {"n": 1})]),
        # a value that has such a tag
        ("<function=f><parameter=s>a </tool_call> b</parameter></function>", None, [("f", {"s": "a </tool_call> b"})]),
        # the last is cut
        (F + "<tool_call><function=f><parameter=n>1</parameter><par", None, [("f", {"n": 1})]),
        (F + "<tool_call><function=f", None, [("f", {"n": 1})]),
    ],
)
def test_calls(text, content, calls):
    assert found("qwen3_coder", text, TOOLS) == (content, calls)
    assert found("qwen3_xml", text, TOOLS) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call> done",
        "<function=f",
        "<function=f><parameter=n>1",
        "<function=f><parameter=n>1</param",
        "<function=f><parameter=n",
        "<function=><parameter=n>1</parameter></function>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "f</function>",
    ],
)
def test_what_is_no_call_is_content(text):
    assert found("qwen3_coder", text, TOOLS) == (text, [])
