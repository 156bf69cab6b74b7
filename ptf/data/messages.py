r"""Messages and tools of data sets, converted to what a chat template takes.

A template takes messages as a list of {role, content} and tools as objects.

Another form is converted if it has one interpretation, and is refused by name if it has several. The text of a message
is not searched for anything, except the turns of `\\n\\nHuman: … \\n\\nAssistant: …` where a whole text begins with
them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ptf.data.sources.json_values import JsonObject, levels
from ptf.errors import UserError

Message = dict[str, Any]
MAX_DEPTH = 100  # objects and lists nested inside each other that a template may receive
CALLS = ("function_call", "tool_call")  # the roles of an assistant's message that is a tool call in JSON
ROLES = {  # what the `from` of messages {from, value}, or a `role`, stands for; a template gets other roles as they are
    "system": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "assistant", "model", "bot", *CALLS), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response", "function", "ipython"), "tool"),
}
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
THOUGHTS = ("reasoning_content", "thinking")
TURN = re.compile(r"\n\n(Human|Assistant):")
LARGEST = float(np.finfo(np.float32).max)


def finite(value: Any) -> bool:
    """Return whether a value is a number that fp32 can hold."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def as_number(text: str) -> Any:
    """Return the number or boolean that a text holds; None for an empty text, and any other text unchanged."""
    text = text.strip()
    if not text or text.lower() in ("true", "false"):
        return text.lower() == "true" if text else None
    try:
        return int(text) if text.lstrip("+-").isdecimal() and len(text) < 20 else float(text)
    except ValueError:
        return text


def normalize_messages(value: Any, name: str, columnar: bool = False) -> Any:
    """Return the value of the column `name` with every message in it as {role, content, …}.

    A string stays one, unless it holds turns. `columnar`: the row comes from a format that writes a null for every key
    that another row has; the nulls inside tool calls are then removed. Raises UserError for a message in an unknown
    form, or that holds more than text.
    """
    if isinstance(value, dict):
        return _message(value, name, columnar)
    if isinstance(value, str):
        return parse_turns(value, name)
    if not isinstance(value, list):
        return value
    if value and all(isinstance(m, dict) and "role" not in m and {"input", "output"} <= m.keys() for m in value):
        return _pairs(value, name)
    messages = [_message(m, f"{name}: message {i}", columnar) for i, m in enumerate(value)]
    are_calls = [m.get("role", m.get("from")) in CALLS for m in value]
    return _with_calls_joined(messages, are_calls) if any(are_calls) else messages


def _with_calls_joined(messages: Sequence[Message], are_calls: Sequence[bool]) -> list[Message]:
    """Return the messages with each tool call that is a message of its own in the assistant's turn before it."""
    joined: list[Message] = []
    for message, is_call in zip(messages, are_calls, strict=True):
        agree = (
            (joined[-1].get(key), v) for key, v in message.items() if joined and key not in ("content", "tool_calls")
        )
        if joined and is_call and all(v in (None, known) for known, v in agree):
            joined[-1] = joined[-1] | {"tool_calls": [*(joined[-1].get("tool_calls") or ()), *message["tool_calls"]]}
        else:
            joined.append(message)
    return joined


def _message(message: Any, where: str, columnar: bool) -> Message:
    """Return a message as {role, content, …}. Raises UserError for an unknown form; `where` names the message."""
    if not isinstance(message, dict):
        raise UserError(f"{where} must be an object with a `role` and a `content`, not {_kind(message)}")
    if "role" not in message and {"from", "value"} <= message.keys():
        if message["from"] not in list(ROLES):
            raise UserError(
                f"{where} is from {str(message['from'])[:60]!r}; known are {', '.join(ROLES)}: "
                "write `messages` with data.prepare"
            )
        message = {"role": message["from"], "content": message["value"], **message}
        del message["from"], message["value"]
    role = message.get("role")
    if role in CALLS:
        calls = parse_json(message.get("content"), f"{where} ({role})")
        calls = calls if isinstance(calls, list) else [calls]
        message = {**message, "role": "assistant", "content": "", "tool_calls": calls}
    elif role in list(ROLES):
        message = {**message, "role": ROLES[role]}
    if message.get("function_call") and not message.get("tool_calls"):
        message = {**message, "tool_calls": [message["function_call"]], "content": message.get("content") or ""}
        del message["function_call"]
    if columnar and message.get("tool_calls"):
        message = {**message, "tool_calls": without_nulls(message["tool_calls"])}
    if isinstance(message.get("content"), list):
        message = {**message, "content": _text(message["content"], where)}
    if medium := next((key for key in MEDIA if message.get(key)), None):
        raise UserError(
            f"{where} has `{medium}`; ptf trains text only: leave such rows out with data.prepare, "
            "or set data.max_bad_rows_share"
        )
    for key in THOUGHTS:
        if not isinstance(message.get(key), str | None):
            raise UserError(f"{where}: `{key}` must be a string, not {_kind(message[key])}")
    if message.get("tool_calls"):
        calls = parse_json(message["tool_calls"], f"{where}: `tool_calls`")
        if not isinstance(calls, list):
            raise UserError(f"{where}: `tool_calls` must be a list of tool calls, not {_kind(calls)}")
        message = {**message, "tool_calls": [_call(call, where) for call in calls]}
    return message


def _pairs(pairs: Sequence[Mapping[str, Any]], name: str) -> list[Message]:
    """Return the messages of [{input, output}]; the last output may be missing."""
    messages: list[Message] = []
    for i, pair in enumerate(pairs):
        for key, role in (("input", "user"), ("output", "assistant")):
            if key == "output" and pair[key] is None and i == len(pairs) - 1:
                continue
            if not isinstance(pair[key], str):
                raise UserError(f"{name}: `{key}` of pair {i} must be a string, not {_kind(pair[key])}")
            messages.append({"role": role, "content": pair[key]})
    return messages


def _text(parts: Sequence[Any], where: str) -> str:
    """Return the text of a content that is a list with one part."""
    unnamed = "part without a type"
    kinds = sorted({str(p.get("type", unnamed))[:40] if isinstance(p, dict) else _kind(p) for p in parts})
    if kinds != ["text"] or any(
        part.get(key) for part in parts for key in (*MEDIA, "image_url", "input_audio", "video_url")
    ):
        raise UserError(
            f"{where} holds {', '.join(kinds) or 'no parts'}; ptf trains text only: "
            "leave such rows out with data.prepare, or set data.max_bad_rows_share"
        )
    if len(parts) > 1 or not isinstance(parts[0].get("text"), str):
        raise UserError(
            f"{where} has {len(parts)} parts of text, and servers differ in how they join them: "
            "write one string with data.prepare"
        )
    return parts[0]["text"]


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object."""
    function = called_function(call, where)
    what = f"{where}: the arguments of {function['name']}"
    if not isinstance(function["arguments"], dict):
        raise UserError(f"{what} must be an object, not {_kind(function['arguments'])}")
    raise_if_unprintable(function["arguments"], what)
    return {**call, "function": function} if "function" in call else function


def called_function(call: Any, where: str) -> dict[str, Any]:
    """Return the function of a tool call, its arguments read where they are JSON; raise UserError for no call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call must be an object with a function's `name` and `arguments`")
    arguments = parse_json(function.get("arguments") or {}, f"{where}: the arguments of {function['name']}", "are")
    return {**function, "arguments": arguments}


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return the row's `tools` as a list of objects; None where it is empty.

    They may be a list of objects, a list of JSON strings, or one JSON string of a list.
    """
    tools = parse_json(tools, "`tools`") if not isinstance(tools, str) or tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"`tools` must be a list of tools, or the JSON of one, not {_kind(tools)}")
    tools = [parse_json(tool, f"`tools`: tool {i}") for i, tool in enumerate(tools)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UserError(f"`tools`: tool {i} must be an object, or the JSON of one, not {_kind(tool)}")
    raise_if_unprintable(tools, "`tools`")
    return tools


def parse_turns(text: str, name: str) -> str | list[Message]:
    r"""Return the messages of a text that is a conversation; any other text unchanged.

    A conversation is `\\n\\nHuman: …\\n\\nAssistant: …`. A text that ends in `\\n\\nAssistant:` ends before the
    response.
    """
    if not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return text
    _, *parts = TURN.split(text)
    messages = [
        {"role": "user" if speaker == "Human" else "assistant", "content": content.removeprefix(" ")}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip():
        messages.pop()
    for i, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[i % 2] or not message["content"].strip():
            raise UserError(
                f"`{name}` is a text of turns (Human:, Assistant:) that do not alternate, "
                f"or of which turn {i} is empty: leave such rows out, or write messages"
            )
    return messages


def parse_json(value: Any, what: str, verb: str = "is") -> Any:
    """Return the value of a string of JSON; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_hook=JsonObject)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{what} {verb} not JSON that can be read ({str(e)[:80]}): {value[:80]!r}") from None


def without_nulls(value: Any) -> Any:
    """Return the value without keys that are null, at every depth.

    Nulls in lists stay, and those of an object that the file holds as JSON.
    """
    if isinstance(value, dict) and not isinstance(value, JsonObject):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def raise_if_unprintable(value: Any, what: str) -> None:
    """Raise UserError where a value holds bytes, or more than `MAX_DEPTH` objects and lists inside each other."""
    for depth, level in enumerate(levels(value)):
        if depth > MAX_DEPTH:
            raise UserError(f"{what}: more than {MAX_DEPTH} objects and lists inside each other")
        if any(isinstance(v, bytes) for v in level):
            raise UserError(f"{what}: bytes are not text; write text, or leave the column out")


def _kind(value: Any) -> str:
    """Return the name of a value's JSON type for a message."""
    return {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }.get(type(value), type(value).__name__)
