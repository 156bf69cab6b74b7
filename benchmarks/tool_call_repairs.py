"""Texts of the formats with tags in which missing tags are filled in and cut calls left out, for vLLM's parsers."""

import contextlib
import json
import re
from collections.abc import Set

FUNCTION = re.compile(r"<function=([^<>]*)(>|</function>)")
OPEN = re.compile(r"<\s*parameter\s*=\s*(?:(?!</function>)[^>])*>")
CLOSE = re.compile(r"<\s*/\s*parameter\s*>")
AFTER = re.compile(r"\s*(<\s*parameter\s*=|</function>|</?tool_call>|<function=|\Z)")  # the end tag of a value
AFTER_CALL = re.compile(r"\s*(</?tool_call>|<function=|\Z)")  # the end tag of a function
CALL_END = re.compile(r"</function>|</tool_call>")
BORDER = re.compile(r"</function>|<tool_call>|</tool_call>|<function=")
KEY = re.compile(r"<arg_key>|</?tool_call>")
PAIR = re.compile(r"<arg_key>(?:(?!<arg_key>|</tool_call>).)*?</arg_key>\s*<arg_value>", re.DOTALL)
VALUE_CLOSE, GLM_END = re.compile("</arg_value>"), re.compile("</tool_call>")
GLM_AFTER, GLM_AFTER_CALL = re.compile(r"\s*(<arg_key>|</?tool_call>|\Z)"), re.compile(r"\s*(<tool_call>|\Z)")
ESCAPED = "\\u005bTOOL_CALLS]"  # a mark as it can stand in JSON
HIDDEN = "\ue002"  # in place of the first character of a tag in a value


def one_word(name: str) -> bool:
    """Return whether a text can be the name of a tool."""
    return re.fullmatch(r"""[^\s<>{}"]+""", name) is not None


def repaired(name: str, text: str, kinds: Set[str]) -> str:
    """Return a text in which the faults of those kinds cannot show, as far as tags go."""
    if name == "hermes":
        return _json_objects(text)
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
    made, position = head.group(), head.end()
    while True:
        border = _start(BORDER, text, position, len(text))
        opened = re.search(r"<\s*parameter\s*=", text[position:border])
        whole = OPEN.match(text, position + opened.start()) if opened else None
        if not whole:
            break
        inside = whole.end()
        lines = text.startswith("\n", inside)
        following = next((m for m in OPEN.finditer(text, inside) if not lines or text[m.start() - 1] == "\n"), None)
        limit = following.start() if following else len(text)
        close, end = _ends(text, inside, limit, CLOSE, AFTER), _ends(text, inside, limit, CALL_END, AFTER_CALL)
        if not (close or end or following):
            return ("", len(text)) if "cut" in kinds else (made + text[position:], len(text))
        if not close or (end and end.start() < close.start()):
            limit = end.start() if end else limit
            close = CLOSE.search(text, inside, limit)
        value_end = close.start() if close else _start(BORDER, text, inside, limit)
        tag = close.group() if close else "</parameter>" if "open" in kinds else ""
        made += text[position:inside] + _hidden(text[inside:value_end], kinds) + tag
        position = close.end() if close else value_end
    if border == len(text) and text[position:].strip():
        return ("", len(text)) if "cut" in kinds else (made + text[position:], len(text))
    end = text.startswith("</function>", border)
    made += text[position:border] + ("</function>" if end or border == len(text) or "swallowed" in kinds else "")
    return ("" if nameless else made), border + len("</function>") * end


def _call(text: str, start: int, kinds: Set[str]) -> tuple[str, int]:
    """Return the repaired call at `start`, and where the text goes on."""
    inside = start + len("<tool_call>")
    position = read = _start(KEY, text, inside, len(text))
    name = text[inside:position].strip()
    if text.startswith("<tool_call>", position):
        return ("" if "swallowed" in kinds else text[start:position]), position
    if position == len(text):
        return ("", position) if "cut" in kinds else (text[start:], position)
    made, shown = text[start:position], position
    while text.startswith("<arg_key>", position):
        pair = PAIR.match(text, position)
        if not pair:
            following = _start(KEY, text, position + len("<arg_key>"), len(text))
            made += text[shown : position if "spanning" in kinds else following]
            position = shown = following
            continue
        close = _ends(text, pair.end(), len(text), VALUE_CLOSE, GLM_AFTER)
        end = _ends(text, pair.end(), len(text), GLM_END, GLM_AFTER_CALL)
        if not (close or end):
            return ("", len(text)) if "cut" in kinds else (made + text[shown:], len(text))
        if not close or (end and end.start() < close.start()):
            close, value_end = None, text.index("</tool_call>", pair.end())
        else:
            value_end = close.start()
        tag = "</arg_value>" if close or "open" in kinds else ""
        made += text[shown : pair.end()] + _hidden(text[pair.end() : value_end], kinds) + tag
        read = shown = close.end() if close else value_end
        position = _start(KEY, text, read, len(text))
    if position == len(text) and text[read:].strip():
        return ("", position) if "cut" in kinds else (made + text[shown:], position)
    closed = text.startswith("</tool_call>", position)
    made += text[shown:position] + ("</tool_call>" if closed or position == len(text) or "swallowed" in kinds else "")
    return ("" if not name and "nameless" in kinds else made), position + len("</tool_call>") * closed


def _ends(text: str, start: int, end: int, tag: re.Pattern[str], after: re.Pattern[str]) -> re.Match[str] | None:
    """Return the first such tag that something of the form, or the text's end, follows."""
    return next((found for found in tag.finditer(text, start, end) if after.match(text, found.end())), None)


def _hidden(value: str, kinds: Set[str]) -> str:
    """Return a value whose tags vLLM's parser does not see."""
    return value.replace("<", HIDDEN) if "inside" in kinds else value


def _json_objects(text: str) -> str:
    """Return a text whose tags inside whole JSON objects are written in another way."""
    return _rewritten(text, re.compile(r"<tool_call>\s*"), "<", "\\u003c")


def escaped_marks(text: str) -> str:
    """Return a text of Mistral's whose marks inside whole JSON values are written in another way."""
    mark = re.compile(r"\[TOOL_CALLS\](?:[^\[{]*+(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\]|(?=\{)))?\s*")
    return _rewritten(text, mark, "[TOOL_CALLS]", ESCAPED)


def _rewritten(text: str, mark: re.Pattern[str], old: str, new: str) -> str:
    """Return a text in which `old` is `new` in the JSON value after each mark."""
    made, position, decoder = "", 0, json.JSONDecoder()
    while found := mark.search(text, position):
        begin = end = found.end()
        with contextlib.suppress(ValueError, RecursionError):
            end = decoder.raw_decode(text, begin)[1]
        made += text[position:begin] + text[begin:end].replace(old, new)
        position = end
    return made + text[position:]
