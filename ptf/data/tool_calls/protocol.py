"""What a parser of tool calls takes and gives, and a call that is written as a JSON object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.data.tool_calls import json_text

MALFORMED = (*json_text.MALFORMED, TypeError, KeyError)  # what a value that is not a call raises


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name and the JSON text of its arguments, as in chat completions.

    The arguments are valid JSON. They are an object unless the model wrote a different JSON value in their place, which
    is passed on as it is.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A response split into its content (None where there is none) and its tool calls, in the order of the text."""

    content: str | None
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A form in which models write tool calls. It has no state; one object serves any number of texts."""

    # Splits the whole text of a response. Its second argument are the tools of the request, as in chat completions:
    # formats that write arguments as plain text take the types of values from their schemas.
    parse: Callable[[str, Sequence[Mapping[str, Any]] | None], ParsedAnswer]
    # Returns the longest known prefix of the content that no continuation of `text` can change: a prefix of
    # `parse(text + more).content` for every `more`, which grows with the text.
    certain: Callable[[str], str]
    # Separates a text, which has `ended` or goes on, into its thinking and what else it says (`harmony.divide`); None
    # where thinking is text like any other.
    divide: Callable[..., tuple[str | None, str | None]] | None = None
    in_list: bool = False  # whether the calls of a response are one list
    # What completes a call, or begins the next one.
    ends: tuple[str, ...] = ("</tool_call>", "</function>", "<|call|>", "<tool_call>", "<function=")


def answer(text: str, content: str, calls: Sequence[ToolCall]) -> ParsedAnswer:
    """Return `content` and the calls; the whole `text` as content where there are no calls."""
    return ParsedAnswer((content if calls else text) or None, tuple(calls))


def call_of(value: Any, argument_keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """Return the call that a JSON value describes; its arguments are under the first of the keys that it has.

    Raises one of MALFORMED where it describes none.
    """
    name = value["name"]
    if not isinstance(name, str) or not name.strip() or not json_text.is_encodable(name):
        raise TypeError("not the name of a tool")
    key = next((key for key in argument_keys if key in value), argument_keys[-1])
    return ToolCall(name, json_text.write(value[key]))
