"""GLM: a name, and keys and values as tags."""

import pytest

from tests.data.tool_calls.tables import TOOLS, found

LINES = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
F = LINES.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (LINES, None, [("f", {"n": 1})]),
        (f"\nSure. \n{F}{F} done", "Sure.", [("f", {"n": 1})] * 2),
        ("<tool_call>f\n</tool_call>", None, [("f", {})]),
        ("<tool_call>f<arg_key>s</arg_key><arg_value>\n a </arg_value></tool_call>", None, [("f", {"s": "\n a "})]),
        ("<tool_call>g<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", None, [("g", {"n": "1"})]),
        ("<think>Hm.</think>\nHi" + F, "<think>Hm.</think>\nHi", [("f", {"n": 1})]),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>1</tool_call>", None, [("f", {"n": 1})]),  # no end of the value
        (F.removesuffix("</tool_call>") + F, None, [("f", {"n": 1})] * 2),  # no end of the call
        (F.removesuffix("</tool_call>"), None, [("f", {"n": 1})]),
        ("<tool_call>f" + F, None, [("f", {"n": 1})]),
        (
            "<tool_call>f<arg_key>s</arg_key><arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
            None,
            [("f", {"n": 1})],
        ),
        (F + "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg", None, [("f", {"n": 1})]),  # the last is cut
    ],
)
@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_calls(name, text, content, calls):
    assert found(name, text, TOOLS) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f",
        "<tool_call></tool_call> done",
        "<tool_call>f<arg_key>",
        "<tool_call>f<arg_key>n</arg_key><arg_value>1",
        "<tool_call><arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>I call f</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text):
    assert found("glm45", text, TOOLS) == (text, [])
