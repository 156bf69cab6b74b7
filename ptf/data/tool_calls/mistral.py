"""Mistral: the special token `[TOOL_CALLS]`, then calls in one of two forms.

Which one depends on the version of the tokenizer:

* `[{"name": …, "arguments": {…}}, …]`, all calls in one array (before version 11), or
* `NAME[ARGS]{…}` or `NAME{…}`, one mark for each call (since version 11); `[CALL_ID]` and an id may follow the name.

The text shows which, so both are read. Text after the JSON is passed over. In the second form, arguments of the wrong
type are converted by the tool's schema, as in `schema_types`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import json_text
from ptf.data.tool_calls.protocol import MALFORMED, ParsedAnswer, ToolCall, answer, call_of
from ptf.data.tool_calls.schema_types import json_arguments

MARK = "[TOOL_CALLS]"
NAMED = re.compile(r"([^\[{]*+)(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\]|(?=\{))")  # a name, up to its arguments


def _parts(text: str) -> Iterator[str]:
    """Yield what follows each mark, up to the next one outside its JSON."""
    mark = text.find(MARK)
    while mark >= 0:
        start = mark + len(MARK)
        head = NAMED.match(text, start)
        mark = text.find(MARK, json_text.after(text, head.end() if head else start))
        yield text[start : mark if mark >= 0 else len(text)].strip()


def _array(part: str) -> list[ToolCall]:
    """Return the calls of an array: its first JSON value, or the array of objects in it. Raises one of MALFORMED."""
    try:
        values = json_text.read_first(part)[0]
    except json_text.MALFORMED:
        values = json_text.read(part[max(part.find("[{"), 0) : part.rfind("}]") + 2])
    if not isinstance(values, list):
        raise TypeError("not an array of calls")
    return [call_of({"arguments": {}, **value}) for value in values]


def _named(part: str, head: re.Match[str], tools: Sequence[Mapping[str, Any]] | None) -> ToolCall:
    """Return the call of a name and its arguments; `head` is the name in `part`. Raises one of MALFORMED."""
    name, body = head.group(1).strip(), part[head.end() :].strip()
    if not name:
        raise ValueError("a call without a name")
    value, size = json_text.read_first(body) if body else ({}, 0)
    return ToolCall(name, json_arguments(value, body[:size] or "{}", tools, name))


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; content is stripped before a name, and before an array only where it is white space."""
    content, calls = text.partition(MARK)[0], list[ToolCall]()
    for part in _parts(text):
        head = NAMED.match(part)
        try:
            found = [_named(part, head, tools)] if head else _array(part)
        except MALFORMED:
            continue
        if not calls and (head or content.isspace()):
            content = content.strip()
        calls += found
    return answer(text, content, calls)
