"""Llama 3 (and 4 with JSON): objects `{"name": …, "parameters": {…}}` anywhere in the text, `arguments` also.

All objects of a response are calls, or none: any brace that does not begin one makes the whole text content. Separators
such as `; ` are passed over.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import json_text, openers
from ptf.data.tool_calls.protocol import MALFORMED, ParsedAnswer, answer, call_of

MARKS = ("{", "<|python_tag|>", "<|python_start|>")


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects that are not inside others."""
    position = text.find("{")
    while position >= 0:
        value, end = json_text.read_first(text, position)
        yield value
        position = text.find("{", end)


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; white space alone before a call is no content."""
    try:
        calls = [call_of(value, ("arguments", "parameters")) for value in _objects(text)]
    except MALFORMED:
        calls = []
    head = text[: openers.first(text, MARKS)]
    return answer(text, "" if head.isspace() else head, calls)


def certain(text: str) -> str:
    """Return the text before the first brace or mark."""
    head = openers.before(text, MARKS)
    return "" if head.isspace() else head
