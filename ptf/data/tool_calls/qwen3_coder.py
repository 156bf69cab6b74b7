"""Qwen3-Coder and Qwen 3.5: `<function=NAME>`, and `<parameter=KEY>` before each value, which is plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The tags around the function do not matter. A value loses one line break at each end and gets its type from the tool's
schema. A closing tag is part of a value unless a tag or the text's end follows it; so is an opening tag inside a line
of a value that begins on a line of its own. A value without an end tag ends at the next parameter, at the function's
end, or where the next call begins.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import openers
from ptf.data.tool_calls.protocol import ParsedAnswer, ToolCall, answer
from ptf.data.tool_calls.schema_types import text_arguments

MARKS = ("<tool_call>", "<function=")
FUNCTION, FUNCTION_END = "<function=", "</function>"
BORDERS = (FUNCTION_END, "</tool_call>", *MARKS)  # outside a value, the end of a function
NAME = re.compile(r"([^<>]*)(>|</function>)")
BEGIN = re.compile(r"<\s*parameter\s*=")
OPEN = re.compile(r"<\s*parameter\s*=\s*((?:(?!</function>)[^>])*)>")
CLOSE = re.compile(r"<\s*/\s*parameter\s*>")
VALUE_END = (
    rf"{CLOSE.pattern}(?=\s*(?:{BEGIN.pattern}|</function>|</?tool_call>|<function=|\Z))"
    r"|(?=</(?:function|tool_call)>\s*(?:</?tool_call>|<function=|\Z))"  # of a value without an end tag
)
ENDS = re.compile(rf"{VALUE_END}|(?={OPEN.pattern})")
ENDS_OF_LINES = re.compile(rf"{VALUE_END}|(?<=\n)(?={OPEN.pattern})")  # where the value is on lines of its own


def _body(text: str, start: int) -> tuple[dict[str, str], int, bool]:
    """Return the parameters of the function whose body begins at `start`, where it ends in the text, and whether the
    text's end cuts it."""
    values: dict[str, str] = {}
    while True:
        border = openers.first(text, BORDERS, start)
        begun = BEGIN.search(text, start, border)
        opened = begun and OPEN.match(text, begun.start())
        if not opened:
            return values, border, border == len(text) and bool(text[start:].strip())
        inside = opened.end()
        end = (ENDS_OF_LINES if text.startswith("\n", inside) else ENDS).search(text, inside)
        if end is None:
            return values, len(text), True
        close = end if end.group() else CLOSE.search(text, inside, end.start())
        value_end = close.start() if close else openers.first(text, BORDERS, inside, end.start())
        values[opened.group(1)] = text[inside:value_end].removeprefix("\n").removesuffix("\n")
        start = close.end() if close else value_end


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; content is stripped where calls follow."""
    calls, position = [], text.find(FUNCTION)
    while position >= 0:
        position += len(FUNCTION)
        named = NAME.match(text, position)
        if named:
            whole = named.group(2) == FUNCTION_END
            values, position, is_cut = ({}, named.end(), False) if whole else _body(text, named.end())
            if (name := named.group(1).strip()) and not is_cut:
                calls.append(ToolCall(name, text_arguments(values, tools, name)))
        position = text.find(FUNCTION, position)
    return answer(text, text[: openers.first(text, MARKS)].strip(), calls)
