"""Rows of the tables of cases: a text, its content and its calls."""

import json
from typing import Any

from ptf.data.tool_calls import parser

Call = tuple[str, Any]  # a name, and the value of its arguments


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool as in chat completions."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("f", n={"type": "integer"}, x={"type": "number"}, s={"type": "string"}, b={"type": "boolean"})]


def found(name: str, text: str, tools: list[dict[str, Any]] | None = None) -> tuple[str | None, list[Call]]:
    """Return the content and the calls that a format finds."""
    answer = parser(name).parse(text, tools)
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
