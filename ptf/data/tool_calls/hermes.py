"""Hermes, also of Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

All calls of a response are read, or none: one that is not JSON makes the whole text content. The last may lack its end
tag if its JSON is complete. A tag inside the JSON is part of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import json_text, openers
from ptf.data.tool_calls.protocol import MALFORMED, ParsedAnswer, answer, call_of

START, END = "<tool_call>", "</tool_call>"


def _bodies(text: str) -> Iterator[str]:
    """Yield what stands between the tags, or between the last tag and the text's end."""
    position = text.find(START)
    while position >= 0:
        start = position + len(START)
        end = text.find(END, json_text.after(text, start))
        yield text[start : end if end >= 0 else len(text)]
        position = text.find(START, end) if end >= 0 else -1


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; content is not stripped."""
    try:
        calls = [call_of(json_text.read(body)) for body in _bodies(text)]
    except MALFORMED:
        calls = []
    return answer(text, text[: openers.first(text, (START,))], calls)
