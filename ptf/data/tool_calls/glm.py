"""GLM 4.5 to 4.7: a name, then pairs of `<arg_key>` and `<arg_value>`, between `<tool_call>` tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

4.5 writes a line break after the name and between the tags, 4.7 does not; both are read. A value is kept as it is and
gets its type from the tool's schema. The end tag may be missing before the next call, and at the text's end after a
complete pair; a value without an end tag ends with the call.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ptf.data.tool_calls import openers
from ptf.data.tool_calls.protocol import ParsedAnswer, ToolCall, answer
from ptf.data.tool_calls.schema_types import text_arguments

START, END, KEY, VALUE_END = "<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"
NAME = re.compile(r"""[^\s<>{}"]+""")  # one word; a call in a different format is none here
PAIR = re.compile(r"<arg_key>((?:(?!<arg_key>).)*?)</arg_key>\s*<arg_value>", re.DOTALL)


class _Body(NamedTuple):
    """A name, the arguments, and where the call ends in the text; the name is empty where there is no call."""

    name: str
    values: dict[str, str]
    end: int


def _body(text: str, start: int) -> _Body:
    """Read the call whose tag ends at `start`."""
    limit = text.find(END, start)
    closed = limit >= 0
    limit = limit if closed else len(text)
    name_end = openers.first(text, (KEY, START), start, limit)
    if text.startswith(START, name_end) or (name_end == limit and not closed):
        return _Body("", {}, name_end)
    name, values = text[start:name_end].strip(), {}
    start = read = name_end  # `read`: the end of the last complete pair
    while text.startswith(KEY, key := openers.first(text, (KEY, START), start, limit)):
        pair = PAIR.match(text, key, limit)
        if pair is None:
            start = key + len(KEY)
            continue
        end = text.find(VALUE_END, pair.end(), limit)
        if end < 0 and not closed:
            return _Body("", {}, limit)
        values[pair.group(1).strip()] = text[pair.end() : end if end >= 0 else limit]
        start = read = end + len(VALUE_END) if end >= 0 else limit
    cut = not closed and key == limit and text[read:limit].strip()
    return _Body("" if cut or not NAME.fullmatch(name) else name, values, key)


class Glm:
    """A name, and keys and values as tags."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
        """Split a response; content is stripped where calls follow."""
        calls, position = [], text.find(START)
        while position >= 0:
            body = _body(text, position + len(START))
            if body.name:
                calls.append(ToolCall(body.name, text_arguments(body.values, tools, body.name)))
            position = text.find(START, body.end)
        return answer(text, text[: openers.first(text, (START,))].strip(), calls)

    def certain(self, text: str) -> str:
        """Return the text before the first tag, without white space at its end."""
        return openers.certain_if_stripped(text, (START,))
