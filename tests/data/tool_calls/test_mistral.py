"""Mistral: arrays of calls, and names with arguments."""

import pytest

from ptf.data.tool_calls import ToolCall, parser
from tests.data.tool_calls.tables import TOOLS, found

ARRAY = '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]'
NAMED = '[TOOL_CALLS]f[ARGS]{"n": 1}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (ARRAY, None, [("f", {"n": 1})]),
        (NAMED, None, [("f", {"n": 1})]),
        (f"Sure. {ARRAY}", "Sure. ", [("f", {"n": 1})]),
        (f" Sure. {NAMED}", "Sure.", [("f", {"n": 1})]),
        (f" \n{ARRAY}", None, [("f", {"n": 1})]),
        ('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": {}, "id": "a"}]', None, [("f", {}), ("g", {})]),
        ('[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g [ARGS] {} done', None, [("f", {"n": 1}), ("g", {})]),
        ('[TOOL_CALLS]f[CALL_ID]Ab3dE6gh9[ARGS]{"n": 1}', None, [("f", {"n": 1})]),
        ("[TOOL_CALLS]f[ARGS]", None, [("f", {})]),
        ('[TOOL_CALLS]calls: [{"name": "f"}] done', None, [("f", {})]),
        (ARRAY + ARRAY + NAMED, None, [("f", {"n": 1})] * 3),
        (NAMED + '[TOOL_CALLS]g[ARGS]{"n"', None, [("f", {"n": 1})]),  # the last is cut
    ],
)
def test_calls(text, content, calls):
    assert found("mistral", text, TOOLS) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]get_wea",
        '[TOOL_CALLS]f[ARGS]{"n": 1',
        "[TOOL_CALLS]f[ARGS]none",
        '[TOOL_CALLS]f{"n": NaN}',
        '[TOOL_CALLS]{"name": "f", "arguments": {}}',
        '[TOOL_CALLS][{"arguments": {}}]',
        '[TOOL_CALLS][{"name": "f"}, 3]',
        '[TOOL_CALLS][{"name": "f"',
        'Hi [TOOL_CALLS]"f"',
        '[{"name": "f"}]',
    ],
)
def test_what_is_no_call_is_content(text):
    assert found("mistral", text, TOOLS) == (text, [])


def test_arguments_that_fit_their_schema_are_passed_on_as_they_are_written():
    text = '[TOOL_CALLS]f[ARGS]{"n":1,  "x": 1e3, "s": null}'
    assert parser("mistral").parse(text, TOOLS).tool_calls == (ToolCall("f", '{"n":1,  "x": 1e3, "s": null}'),)
    text = '[TOOL_CALLS]f[ARGS]{"n":"1", "x": 1e3}'  # the control
    assert parser("mistral").parse(text, TOOLS).tool_calls == (ToolCall("f", '{"n": 1, "x": 1000.0}'),)
