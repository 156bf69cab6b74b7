"""Llama 3: JSON objects without tags."""

import pytest

from tests.data.tool_calls.tables import found

F = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (F, None, [("f", {"x": 1})]),
        ('{"name": "f", "arguments": {}, "parameters": {"x": 1}}', None, [("f", {})]),
        (f"<|python_tag|>{F}; {F}", None, [("f", {"x": 1})] * 2),
        (f"{F}{F}", None, [("f", {"x": 1})] * 2),
        (f"\n\n{F}", None, [("f", {"x": 1})]),
        (f"Sure. {F} done", "Sure. ", [("f", {"x": 1})]),
        (f"Sure. <|python_start|>{F}<|python_end|>", "Sure. ", [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {"s": "a } { b"}}', None, [("f", {"s": "a } { b"})]),
    ],
)
def test_calls(text, content, calls):
    assert found("llama3_json", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"',
        '{"name": "f"}',
        "{1, 2}",
        f"{F} and {{",
        f'{F}; {{"x": 1}}',
        "{'name': 'f'}",
        '{"name": [], "parameters": {}}',
    ],
)
def test_what_is_no_call_is_content(text):
    assert found("llama3_json", text) == (text, [])
