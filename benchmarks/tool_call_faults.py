"""Faults of vLLM's parsers of tool calls, each with a rule that undoes it.

A rule repairs the text, changes the tools or edits the result, and lets vLLM's own parser read again. A difference
between vLLM and ptf is explained by the faults whose rules change vLLM's result, if the last result is ptf's.
"""

import ast
import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.tool_call_repairs import ESCAPED, HIDDEN, escaped_marks, one_word, repaired
from tests.data.tool_calls.tables import tool

Tools = list[dict[str, Any]] | None
TEXT_FORMATS = ("qwen3_coder", "qwen3_xml", "glm45", "glm47")
JSON_FORMATS = ("hermes", "llama3_json", "llama4_pythonic")
THOUGHTS = {"<think>": "\ue000>", "</think>": "\ue001>"}  # marks of thinking, and what hides them from vLLM's parser
QWEN, GLM = TEXT_FORMATS[:2], TEXT_FORMATS[2:]


class Result(NamedTuple):
    """Content (empty where there is none) and calls: name and JSON text of the arguments. `crash` names an error."""

    content: str
    calls: tuple[tuple[str, str], ...]
    crash: str = ""


Run = Callable[..., Result]  # (name, text, tools, **options of the parser)


@dataclass
class Reading:
    """vLLM's result on a text while faults are undone, one after the other."""

    name: str
    original: str
    text: str
    tools: Tools
    run: Run
    result: Result
    undone: tuple[str, ...] = ()  # keys of the faults so far

    def again(self, **options: Any) -> None:
        """Let vLLM's parser read the text as it is now; what was undone stays undone."""
        masks = THOUGHTS if "thoughts" in self.undone else {}
        result = self.run(self.name, exchanged(self.text, masks), self.tools, **options)
        back = {mask: mark for mark, mask in masks.items()} | {mask[0]: mark[:-1] for mark, mask in masks.items()}
        back[HIDDEN] = "<"
        escaped = {json.dumps(mask)[1:-1]: mark for mask, mark in back.items()}  # in arguments
        self.result = Result(
            exchanged(result.content, back),
            tuple((exchanged(name, back), exchanged(exchanged(text, back), escaped)) for name, text in result.calls),
            result.crash,
        )
        if "unknown" in self.undone:
            self.keep(call for call in self.result.calls if one_word(call[0]))

    def keep(self, calls: Iterable[tuple[str, str]]) -> None:
        """Replace the calls."""
        self.result = Result(self.result.content, tuple(calls))


def exchanged(text: str, pairs: Mapping[str, str]) -> str:
    """Return a text in which every first of a pair is its second."""
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


def is_json(text: str) -> bool:
    """Return whether a text is JSON that clients read: without NaN and infinities."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _repair(reading: Reading) -> None:
    kinds = {key for key in (*reading.undone, "cut") if key in REPAIRED}
    reading.text = repaired(reading.name, reading.original, kinds)
    reading.again()


def _inside(reading: Reading) -> None:
    """Write the marks inside arguments in another way, which means the same."""
    if reading.name == "mistral":
        reading.text = reading.original = escaped_marks(reading.original)
    else:
        start, end = "<|python_start|>", "<|python_end|>"
        body = reading.text.removeprefix(start).rstrip().removesuffix(end)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(body.lstrip())  # what is no text in it would be no Python
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        if reading.text.startswith(start):
            reading.text = start + body.replace(end, "\\x3c|python_end|>")
    reading.again()


def _digits(reading: Reading) -> None:
    reading.tools = with_integers(reading.tools)
    reading.again()


def with_integers(value: Any) -> Any:
    """Return schemas in which every number may be an integer, which vLLM's parser then tries first."""
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: with_integers(item) for key, item in value.items()}
    kind = value.get("type")
    if isinstance(kind, str) and kind.lower() in ("number", "float"):
        value["type"] = ["integer", kind]
    return value


def _unknown(reading: Reading) -> None:
    found = reading.run(reading.name, reading.text, None).calls
    known = {tool["function"]["name"] for tool in reading.tools or ()}
    if reading.tools:
        more = dict.fromkeys(name for name, _ in found if name not in known and one_word(name))
        reading.tools = [*reading.tools, *({"type": "function", "function": {"name": name}} for name in more)]
    reading.again()


def _thoughts(reading: Reading) -> None:
    reading.again()


OPENERS = {"mistral": ("[TOOL_CALLS]",), **dict.fromkeys(QWEN, ("<tool_call>", "<function="))}


def _head(reading: Reading) -> str:
    marks = OPENERS.get(reading.name, ("<tool_call>",))
    return reading.original[: min((reading.original.find(m) for m in marks if m in reading.original), default=None)]


def _lost_text(reading: Reading) -> None:
    """Without calls, content is the text; with calls that only the repaired text has, it is what precedes them."""
    if not reading.result.calls:
        reading.result = Result(reading.original, ())
    elif reading.name != "mistral":
        whole = Reading(reading.name, reading.original, reading.original, reading.tools, reading.run, reading.result)
        whole.undone = ("thoughts",)
        whole.again()
        content = _head(reading).strip()
        if not whole.result.calls or whole.result.content == content:
            reading.result = reading.result._replace(content=content)


def _adjacent(reading: Reading) -> None:
    reading.text = reading.text.replace("}{", "} {")
    reading.again()
    if not reading.result.calls:
        reading.result = Result(reading.original, ())


def _text_before(reading: Reading) -> None:
    if reading.result.calls:
        head = re.split(r"\{|<\|python_tag\|>|<\|python_start\|>", reading.original)[0]
        reading.result = reading.result._replace(content="" if head.isspace() else head)


def _not_json(reading: Reading) -> None:
    if not all(is_json(arguments) for _, arguments in reading.result.calls):
        reading.result = Result(without_python_tags(reading), ())


def _nameless(reading: Reading) -> None:
    if not all(name.strip() for name, _ in reading.result.calls):
        reading.result = Result(reading.original, ())


def without_python_tags(reading: Reading) -> str:
    """Return the content that vLLM gives to a text without calls."""
    text, start = reading.original, "<|python_start|>"
    if reading.name == "llama4_pythonic" and text.startswith(start):
        return text.removeprefix(start).replace("<|python_end|>", "")
    return text


def _expression(reading: Reading) -> None:
    start = "<|python_start|>"
    tag = start if reading.text.startswith(start) else ""
    reading.text = tag + reading.text.removeprefix(tag).lstrip()
    reading.again(any_text=True)
    if not reading.result.calls:
        reading.result = Result(without_python_tags(reading), ())


def _positional(reading: Reading) -> None:
    text = without_python_tags(reading).lstrip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            items = getattr(getattr(ast.parse(text).body[0], "value", None), "elts", [])
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return
    calls = [item for item in items if isinstance(item, ast.Call)]
    if any(call.args or any(word.arg is None for word in call.keywords) for call in calls):
        reading.result = Result(without_python_tags(reading), ())


def _parts(reading: Reading) -> None:
    """Read every part after a mark by itself, without the faults of Mistral's forms that were undone so far."""
    head, *parts = reading.original.split("[TOOL_CALLS]")
    first_in_array = re.search(r"\[TOOL_CALLS\]\s*\[", reading.original) is not None
    calls: list[tuple[str, str]] = []
    content = None
    for part in parts:
        if "call id" in reading.undone:
            part = re.sub(r"^([^\[{]*)\[CALL_ID\]\w*(?=\s*(\[ARGS\]|\{))", r"\1", part)
        name, *arguments = re.split(r"\[ARGS\]|(?=\{)", part, maxsplit=1)
        in_array = "[" in name if "other form" in reading.undone else first_in_array
        if "raises" in reading.undone and in_array:
            part = re.sub(r"^\s*-?(NaN|Infinity)(?=[^{]*\[)", "text", part)  # read as a value that is no array
        if "no arguments" in reading.undone and not in_array and not arguments:
            continue
        found = reading.run(reading.name, "[TOOL_CALLS]" + part, reading.tools, old=in_array)
        if found.crash and "raises" not in reading.undone:
            return
        new = [call for call in found.calls if call[0].strip() or "nameless" not in reading.undone]
        if "nameless" in reading.undone and in_array and len(new) < len(found.calls):
            continue
        if "not JSON" in reading.undone and not all(is_json(arguments) for _, arguments in new):
            continue
        content = (head if in_array and not head.isspace() else head.strip()) if content is None and new else content
        calls += new
    if content is not None or "lost text" in reading.undone:
        reading.result = Result(reading.original if content is None else content, tuple(calls))
    else:
        reading.result = Result(reading.result.content, (), "" if "raises" in reading.undone else reading.result.crash)


def _fitting(reading: Reading) -> None:
    """Take the values as the model wrote them where a value fits its schema, or its schema has no type, or is null."""
    plain = Reading(reading.name, reading.original, reading.text, None, reading.run, reading.result, reading.undone)
    _parts(plain)
    if len(plain.result.calls) != len(reading.result.calls):
        return
    calls = []
    for (name, changed), (_, written) in zip(reading.result.calls, plain.result.calls, strict=True):
        new, old = json.loads(changed), json.loads(written)
        if not isinstance(new, dict):
            calls.append((name, written))
            continue
        functions = [one["function"] for one in reading.tools or () if one["function"]["name"] == name]
        merged = _merged(new, old, functions[0]["parameters"] if functions else {})
        calls.append((name, written if json.dumps(merged) == json.dumps(old) else json.dumps(merged)))
    reading.keep(calls)


def _merged(new: Any, old: Any, schema: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict) and isinstance(schema, dict):
        return {key: _merged(new[key], old[key], schema.get("properties", {}).get(key, {})) for key in old}
    if isinstance(old, list) and isinstance(new, list) and isinstance(schema, dict):
        return [_merged(one, other, schema.get("items", {})) for one, other in zip(new, old, strict=True)]
    return old if old is None or _fits(old, schema) else new


def _fits(value: Any, schema: Any) -> bool:
    if not isinstance(schema, dict) or not schema.keys() & {"type", "enum", "anyOf", "oneOf"}:
        return True
    named = schema.get("type", [])
    names = {n.lower() for n in (named if isinstance(named, list) else [named])}
    kinds = {"string": str, "str": str, "integer": int, "int": int, "number": (int, float), "float": (int, float)}
    kinds |= {"boolean": bool, "bool": bool}
    if any(isinstance(value, kinds[n]) and isinstance(value, bool) == (n[:4] == "bool") for n in names & kinds.keys()):
        return True
    if any(type(value) is type(one) or (type(value), type(one)) == (int, float) for one in schema.get("enum", ())):
        return True
    return any(_fits(value, choice) for key in ("anyOf", "oneOf") for choice in schema.get(key, ()))


class Fault(NamedTuple):
    """A fault of vLLM's parsers: what it does, the rule that undoes it, and the smallest text that shows it."""

    key: str
    formats: tuple[str, ...]
    what: str
    undo: Callable[[Reading], None]
    example: str
    tools: Tools = None


CUT = "a call that the end of the text cuts inside a name or an argument is given as a whole call, without what is cut"
LOST = "where no call is found, the marks and the text between them are lost, and the text after them comes first"
INSIDE = "a tag inside a value ends the value or the call, also one that nothing of the form follows"
DIGITS = "an integer of a parameter with the type `number` loses digits beyond 2⁵³"
NAN = "NaN and infinities are given as arguments, which are then not JSON"
FAULTS = (
    Fault("cut", QWEN, CUT, _repair, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2"),
    Fault(
        "cut",
        GLM,
        CUT,
        _repair,
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>y</arg_key><arg_value>2",
    ),
    Fault(
        "open",
        QWEN,
        "a value without its end tag is lost at the end of a function",
        _repair,
        "<function=f><parameter=x>1</function>",
    ),
    Fault(
        "open",
        GLM,
        "a value without its end tag is lost at the end of a call",
        _repair,
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>",
    ),
    Fault(
        "swallowed",
        QWEN,
        "a call without its end tag takes in the next call",
        _repair,
        "<tool_call><function=f><parameter=x>1</parameter></tool_call><tool_call><function=g><parameter=y>2</parameter></function></tool_call>",
    ),
    Fault(
        "swallowed",
        GLM,
        "a call without its end tag takes in the next call",
        _repair,
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value><tool_call>g<arg_key>y</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    Fault(
        "nameless",
        TEXT_FORMATS,
        "a call without a name takes one from its arguments",
        _repair,
        '<function=><parameter=x>{"name": "g"}</parameter></function>',
    ),
    Fault(
        "spanning",
        GLM,
        "a key without a value takes in the next key",
        _repair,
        "<tool_call>f<arg_key>x</arg_key><arg_key>y</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    Fault(
        "inside",
        QWEN,
        INSIDE,
        _repair,
        "<function=f><parameter=x>End with </parameter>.</parameter></function>",
    ),
    Fault(
        "inside",
        GLM,
        INSIDE,
        _repair,
        "<tool_call>f<arg_key>x</arg_key><arg_value>End with </tool_call>.</arg_value></tool_call>",
    ),
    Fault(
        "inside",
        ("hermes",),
        INSIDE,
        _repair,
        '<tool_call>{"name": "f", "arguments": {"x": "End with </tool_call>."}}</tool_call>',
    ),
    Fault(
        "digits",
        TEXT_FORMATS,
        DIGITS,
        _digits,
        "<function=f><parameter=x>12345678901234567890</parameter></function>",
        [tool("f", x={"type": "number"})],
    ),
    Fault(
        "thoughts",
        TEXT_FORMATS,
        "marks of thinking are removed from content, for GLM with the thought",
        _thoughts,
        "<think>Yes.</think>Sure.",
    ),
    Fault(
        "unknown",
        GLM,
        "a call of a tool that the request does not have is lost; without tools, anything is a name",
        _unknown,
        "<tool_call>g</tool_call>",
        [tool("f")],
    ),
    Fault("lost text", TEXT_FORMATS, LOST, _lost_text, "A <tool_call></tool_call> B"),
    Fault(
        "adjacent",
        ("llama3_json",),
        "the second of two calls without a separator is read as text, and so is the first",
        _adjacent,
        '{"name": "f", "parameters": {}}{"name": "g", "parameters": {}}',
    ),
    Fault(
        "text before",
        ("llama3_json",),
        "the text before a call is lost",
        _text_before,
        'Sure. {"name": "f", "parameters": {}}',
    ),
    Fault(
        "inside",
        ("llama4_pythonic",),
        "an end mark inside an argument is removed",
        _inside,
        '<|python_start|>[f(x="End with <|python_end|>")]<|python_end|>',
    ),
    Fault(
        "inside",
        ("mistral",),
        INSIDE,
        _inside,
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": "Begin with [TOOL_CALLS]"}}]',
    ),
    Fault(
        "expression",
        ("llama4_pythonic",),
        "a list of calls that a regular expression does not cover is text: a dotted name first, a space or a comma at "
        "the brackets, a line break before",
        _expression,
        "[tools.f(x=1)]",
    ),
    Fault("positional", ("llama4_pythonic",), "arguments without a keyword are lost", _positional, "[f(x=1), g(2)]"),
    Fault(
        "nameless",
        JSON_FORMATS[:2],
        "a call with an empty name is given",
        _nameless,
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    ),
    Fault("not JSON", JSON_FORMATS, NAN, _not_json, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    Fault(
        "digits",
        ("mistral",),
        DIGITS,
        _digits,
        '[TOOL_CALLS]f[ARGS]{"x": 12345678901234567890}',
        [tool("f", x={"type": "number"})],
    ),
    Fault(
        "several marks",
        ("mistral",),
        "a second mark raises an error before version 11; since then, one after a name is part of it",
        _parts,
        '[TOOL_CALLS][{"name": "f"}][TOOL_CALLS][{"name": "g"}]',
    ),
    Fault(
        "raises",
        ("mistral",),
        "JSON that is no array of calls raises an error",
        _parts,
        '[TOOL_CALLS][{"arguments": {}}]',
    ),
    Fault(
        "call id",
        ("mistral",),
        "the id of a call becomes part of its name",
        _parts,
        "[TOOL_CALLS]f[CALL_ID]Ab3dE6gh9[ARGS]{}",
    ),
    Fault(
        "other form",
        ("mistral",),
        "a call in the form of a different version is text, or is misread",
        _parts,
        '[TOOL_CALLS][{"name": "f"}][TOOL_CALLS]g[ARGS]{}',
    ),
    Fault("no arguments", ("mistral",), CUT, _parts, "[TOOL_CALLS]get_wea"),
    Fault(
        "nameless", ("mistral",), "a call without a name is given, with an empty one", _parts, '[TOOL_CALLS]{"x": 1}'
    ),
    Fault(
        "not JSON",
        ("mistral",),
        "arguments that are not JSON are given, of cut calls too",
        _parts,
        '[TOOL_CALLS]f[ARGS]{"x": 1',
    ),
    Fault(
        "lost text",
        ("mistral",),
        "where no call is found, the text before the mark is lost, or the mark and what follows",
        _parts,
        "A [TOOL_CALLS][",
    ),
    Fault(
        "fitting",
        ("mistral",),
        'null becomes "null", and values change that their schema allows',
        _fitting,
        '[TOOL_CALLS]f[ARGS]{"x": null, "y": 5}',
        [tool("f", x={"type": "string"}, y={})],
    ),
)
REPAIRED = ("cut", "open", "swallowed", "nameless", "spanning", "inside")


def undo_all(name: str, text: str, tools: Tools, run: Run) -> tuple[Result, list[str]]:
    """Return vLLM's result with all faults of the format undone, and the keys of those that changed it."""
    reading = Reading(name, text, text, copy.deepcopy(tools), run, run(name, text, tools))
    found = []
    for fault in FAULTS:
        if name in fault.formats:
            before = reading.result
            reading.undone = (*reading.undone, fault.key)
            fault.undo(reading)
            if reading.result != before:
                found.append(fault.key)
    return reading.result._replace(content=reading.result.content.replace(ESCAPED, "[TOOL_CALLS]")), found
