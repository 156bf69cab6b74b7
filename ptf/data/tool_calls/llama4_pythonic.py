"""Llama 4: a list of Python calls, `[get_weather(city="Oslo", days=3), now()]`, and nothing before it.

`<|python_start|>` may stand before the list; then it and every `<|python_end|>` are removed, from content too, but not
from arguments. The text is read by Python's parser and never run: arguments are literals, given by keyword.
"""

import ast
import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import json_text, openers
from ptf.data.tool_calls.protocol import ParsedAnswer, ToolCall, answer

START, END = "<|python_start|>", "<|python_end|>"
NAMED_VALUES = {"null": None, "true": True, "false": False}  # which models write as JSON has them
MALFORMED = (*json_text.MALFORMED, SyntaxError, TypeError, MemoryError)  # MemoryError: too many brackets in brackets


def _value(node: ast.expr | None) -> Any:
    """Return the value of a literal; tuples and sets become lists. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=None | str() | bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in NAMED_VALUES:
            return NAMED_VALUES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {key.value: _value(item) for key, item in zip(keys, values, strict=True)}  # pyright: ignore
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _value(operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.JoinedStr(values=parts) if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(_value(part) for part in parts)
    raise ValueError("an argument is not a literal")


def _name(node: ast.expr) -> str:
    """Return the name of what is called, `a` or `a.b`. Raises ValueError for anything else."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return f"{_name(value)}.{name}"
        case ast.Name(id=name):
            return name
    raise ValueError("what is called has no name")


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with arguments by keyword")
    return ToolCall(_name(node.func), json_text.write({str(word.arg): _value(word.value) for word in node.keywords}))


def _calls(text: str) -> list[ToolCall]:
    """Return the calls of the list with which a text begins. Raises one of MALFORMED."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        statement = ast.parse(text.lstrip()).body[0]
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.List):
        raise ValueError("not a list")
    return [_call(item) for item in statement.value.elts]


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; it has content or calls, never both."""
    whole = text
    if text.startswith(START):
        whole = text.removeprefix(START).rstrip().removesuffix(END)
        text = text.removeprefix(START).replace(END, "")
    for candidate in (whole, text) if text.lstrip().startswith("[") else ():
        with contextlib.suppress(*MALFORMED):
            return answer(text, "", _calls(candidate))
    return answer(text, "", ())


def certain(text: str) -> str:
    """Return the text if it cannot begin with a list any more."""
    if START.startswith(text):
        return ""
    if text.startswith(START):
        text = text.removeprefix(START).replace(END, "")
        text = openers.before(text, (END,))
    return "" if text.lstrip()[:1] in ("", "[") else text
