"""A tool call written as a JSON object: its name and its arguments under one of the keys of the format."""

from collections.abc import Sequence
from typing import Any

from ptf.data.tool_calls import json_text
from ptf.data.tool_calls.protocol import ToolCall

MALFORMED = (*json_text.MALFORMED, TypeError, KeyError)  # what a value that is not a call raises


def call_of(value: Any, argument_keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """Return the call that a JSON value describes; its arguments are under the first of the keys that it has.

    Raises one of MALFORMED where it describes none.
    """
    name = value["name"]
    if not isinstance(name, str) or not name.strip() or not json_text.is_encodable(name):
        raise TypeError("not the name of a tool")
    key = next((key for key in argument_keys if key in value), argument_keys[-1])
    return ToolCall(name, json_text.write(value[key]))
