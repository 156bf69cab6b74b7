"""GLM 4.5 to 4.7: a name, then pairs of `<arg_key>` and `<arg_value>`, between `<tool_call>` tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

4.5 writes a line break after the name and between the tags, 4.7 does not; both are read. A value is kept as it is and
gets its type from the tool's schema. A closing tag is part of a value unless a tag or the text's end follows it. The
end tag may be missing before the next call, and at the text's end after a complete pair; a value without an end tag
ends with the call.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import openers
from ptf.data.tool_calls.protocol import ParsedAnswer, ToolCall, answer
from ptf.data.tool_calls.schema_types import text_arguments

START, END, KEY = "<tool_call>", "</tool_call>", "<arg_key>"
MARKS = (KEY, START, END)
NAME = re.compile(r"""[^\s<>{}"]+""")  # one word; a call in a different format is none here
PAIR = re.compile(r"<arg_key>((?:(?!<arg_key>|</tool_call>).)*?)</arg_key>\s*<arg_value>", re.DOTALL)
VALUE_END = re.compile(
    r"</arg_value>(?=\s*(?:<arg_key>|</?tool_call>|\Z))"
    r"|(?=</tool_call>\s*(?:<tool_call>|\Z))"  # of a value without an end tag
)


def _body(text: str, start: int) -> tuple[str, dict[str, str], int]:
    """Return the name and the arguments of the call whose tag ends at `start`, and where it ends.

    The name is empty where there is no call.
    """
    position = read = openers.first(text, MARKS, start)  # `read`: the end of the last complete pair
    if not text.startswith((KEY, END), position):
        return "", {}, position
    name, values = text[start:position].strip(), {}
    while text.startswith(KEY, position):
        pair = PAIR.match(text, position)
        if pair is None:
            position = openers.first(text, MARKS, position + len(KEY))
            continue
        end = VALUE_END.search(text, pair.end())
        if end is None:
            return "", {}, len(text)
        value_end = end.start() if end.group() else text.index(END, pair.end())
        values[pair.group(1).strip()] = text[pair.end() : value_end]
        read = value_end + len(end.group())
        position = openers.first(text, MARKS, read)
    cut = position == len(text) and text[read:].strip()
    return "" if cut or not NAME.fullmatch(name) else name, values, position


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; content is stripped where calls follow."""
    calls, position = [], text.find(START)
    while position >= 0:
        name, values, end = _body(text, position + len(START))
        if name:
            calls.append(ToolCall(name, text_arguments(values, tools, name)))
        position = text.find(START, end)
    return answer(text, text[: openers.first(text, (START,))].strip(), calls)
