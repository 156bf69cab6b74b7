"""Texts of the formats with tags in which missing tags are filled in and cut calls left out, for vLLM's parsers."""

import re
from collections.abc import Set

FUNCTION = re.compile(r"<function=([^<>]*)(>|</function>)")
OPEN = re.compile(r"<\s*parameter\s*=\s*[^>]*>")
CLOSE = re.compile(r"<\s*/\s*parameter\s*>")
END = re.compile(r"</function>")
BORDER = re.compile(r"<tool_call>|</tool_call>|<function=")
KEY = re.compile(r"<arg_key>|<tool_call>")
PAIR = re.compile(r"<arg_key>(?:(?!<arg_key>).)*?</arg_key>\s*<arg_value>", re.DOTALL)


def one_word(name: str) -> bool:
    """Return whether a text can be the name of a tool."""
    return re.fullmatch(r"""[^\s<>{}"]+""", name) is not None


def repaired(name: str, text: str, kinds: Set[str]) -> str:
    """Return a text in which the faults of those kinds cannot show, as far as tags go."""
    step = _function if name.startswith("qwen") else _call
    mark = "<function=" if name.startswith("qwen") else "<tool_call>"
    made, position = "", 0
    while (start := text.find(mark, position)) >= 0:
        made += text[position:start]
        piece, position = step(text, start, kinds)
        made += piece
    return made + text[position:]


def _start(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    found = pattern.search(text, start, end)
    return found.start() if found else end


def _function(text: str, start: int, kinds: Set[str]) -> tuple[str, int]:
    """Return the repaired function at `start`, and where the text goes on."""
    head = FUNCTION.match(text, start)
    if not head:
        broken = start + len("<function=")
        cut = not re.search("[<>]", text[broken:])
        return ("", len(text)) if cut and "cut" in kinds else ("" if "swallowed" in kinds else "<function=", broken)
    nameless = not head.group(1).strip() and "nameless" in kinds
    if head.group(2) != ">":
        return ("" if nameless else head.group()), head.end()
    limit = _start(END, text, head.end(), len(text))
    closed = limit < len(text)
    made, position = head.group(), head.end()
    while True:
        border = _start(BORDER, text, position, limit)
        opened = OPEN.search(text, position, limit)
        if not opened or opened.start() > border:
            break
        following = _start(OPEN, text, opened.end(), limit)
        close = CLOSE.search(text, opened.end(), following)
        border = _start(BORDER, text, opened.end(), following)
        if close or (border == following < limit):
            end = close.end() if close else following
            made, position = made + text[position:end], end
            continue
        if border == limit and not closed:
            return ("", len(text)) if "cut" in kinds else (made + text[position:], len(text))
        value_end = "</parameter>" if "open" in kinds else ""
        made, position = made + text[position:border] + value_end, border
    if border == limit and not closed and text[position:].strip():
        return ("", len(text)) if "cut" in kinds else (made + text[position:], len(text))
    ended = border < limit and "swallowed" in kinds
    made += text[position:border] + ("</function>" if ended or border == limit else "")
    end = border + len("</function>") * (border == limit and closed)
    return ("" if nameless else made), end


def _call(text: str, start: int, kinds: Set[str]) -> tuple[str, int]:
    """Return the repaired call at `start`, and where the text goes on."""
    inside = start + len("<tool_call>")
    limit = text.find("</tool_call>", inside)
    closed = limit >= 0
    limit = limit if closed else len(text)
    name_end = _start(KEY, text, inside, limit)
    if text.startswith("<tool_call>", name_end):
        return ("" if "swallowed" in kinds else text[start:name_end]), name_end
    if name_end == limit and not closed:
        return ("", limit) if "cut" in kinds else (text[start:], limit)
    made, position, read = text[start:name_end], name_end, name_end
    while text.startswith("<arg_key>", key := _start(KEY, text, position, limit)):
        pair = PAIR.match(text, key, limit)
        if not pair:
            following = _start(KEY, text, key + len("<arg_key>"), limit)
            made += text[position : key if "spanning" in kinds else following]
            position = following
            continue
        end = text.find("</arg_value>", pair.end(), limit)
        if end < 0 and not closed:
            return ("", limit) if "cut" in kinds else (made + text[position:], limit)
        value_end = "</arg_value>" if end >= 0 or "open" in kinds else ""
        made += text[position : end if end >= 0 else limit] + value_end
        position = read = end + len("</arg_value>") if end >= 0 else limit
    if key == limit and not closed and text[read:].strip():
        return ("", limit) if "cut" in kinds else (made + text[position:], limit)
    made += text[position:key] + ("</tool_call>" if key == limit or "swallowed" in kinds else "")
    nameless = not text[inside:name_end].strip() and "nameless" in kinds
    return ("" if nameless else made), key + len("</tool_call>") * (key == limit and closed)
