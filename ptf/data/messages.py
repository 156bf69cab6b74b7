"""Messages and tools as data sets write them, as what a chat template is given: lists of {role, content}, tools as objects.

The one idea: a list is converted where its form leaves one reading, and refused by name where it does not. Nothing is looked for inside the text of a
message, except the turns of `\\n\\nHuman: … \\n\\nAssistant: …` where a whole text begins with them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ptf.errors import UserError

Message = dict[str, Any]
DEEPEST = 100  # objects and lists inside each other that a template is given
CALL = "function_call"  # the role of an assistant whose message is a tool call in JSON
ROLES = {  # of messages {from, value}
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", CALL: "assistant",
    "observation": "tool", "tool": "tool",
}  # fmt: skip
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
LOOKED_AT = frozenset((*MEDIA, "tool_calls", "reasoning_content", "thinking"))
TURN = re.compile(r"\n\n(Human|Assistant):")
LARGEST = float(np.finfo(np.float32).max)


def finite(value: Any) -> bool:
    """Whether it is a number that fp32 can hold."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def as_number(text: str) -> Any:
    """The number, or the truth, that a text is; none where it is empty, and any other text as it is."""
    text = text.strip()
    if not text or text.lower() in ("true", "false"):
        return text.lower() == "true" if text else None
    try:
        return int(text) if text.lstrip("+-").isdecimal() and len(text) < 20 else float(text)
    except ValueError:
        return text


def conversation(value: Any, name: str, columnar: bool = False) -> Any:
    """The value of the column `name` with every message in it as {role, content, …}; a string stays one, unless it holds turns. `columnar`: the row is
    of a format that writes a null for every key that another row has; then tool calls lose their nulls. Raises UserError for a message in a form that
    is not known, or that holds more than text."""
    if isinstance(value, dict):
        return _message(value, name, columnar)
    if isinstance(value, str):
        return turns(value, name)
    if not isinstance(value, list):
        return value
    if value and all(isinstance(m, dict) and "role" not in m and {"input", "output"} <= m.keys() for m in value):
        return _pairs(value, name)
    return [m if _is_plain(m) else _message(m, f"{name}: message {i}", columnar) for i, m in enumerate(value)]


def _is_plain(message: Any) -> bool:
    """Whether it is {role, content} and nothing that has to be looked at: most are."""
    return isinstance(message, dict) and "role" in message and isinstance(message.get("content"), str) and LOOKED_AT.isdisjoint(message)


def _message(message: Any, where: str, columnar: bool) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where} must be an object with a `role` and a `content`, not {_kind(message)}")
    if columnar and message.get("tool_calls"):
        message = {**message, "tool_calls": without_nulls(message["tool_calls"])}
    if "role" not in message and {"from", "value"} <= message.keys():
        message = _renamed(message, where)
    if isinstance(message.get("content"), list):
        message = {**message, "content": _text(message["content"], where)}
    for key in MEDIA:
        if message.get(key):
            raise UserError(f"{where} has `{key}`; ptf trains text only: leave such rows out with data.prepare, or data.on_bad_row: skip")
    for key in ("reasoning_content", "thinking"):
        if not isinstance(message.get(key), str | None):
            raise UserError(f"{where}: `{key}` must be a string, not {_kind(message[key])}")
    if message.get("tool_calls"):
        calls = parsed(message["tool_calls"], f"{where}: `tool_calls`")
        if not isinstance(calls, list):
            raise UserError(f"{where}: `tool_calls` must be a list of tool calls, not {_kind(calls)}")
        message = {**message, "tool_calls": [_call(call, where) for call in calls]}
    return message


def _renamed(message: Message, where: str) -> Message:
    """A message {from, value} as {role, content}; its further keys stay."""
    said, value = message["from"], message["value"]
    if not isinstance(said, str) or said not in ROLES:
        raise UserError(f"{where} is from {str(said)[:60]!r}; known are {', '.join(ROLES)}: write `messages` with data.prepare")
    others = {key: v for key, v in message.items() if key not in ("from", "value")}
    if said != CALL:
        return {"role": ROLES[said], "content": value, **others}
    calls = parsed(value, f"{where} ({CALL})")
    return {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls], **others}


def _pairs(pairs: Sequence[Mapping[str, Any]], name: str) -> list[Message]:
    """Messages of [{input, output}]; the last output may be missing."""
    found: list[Message] = []
    for i, pair in enumerate(pairs):
        for key, role in (("input", "user"), ("output", "assistant")):
            if key == "output" and pair[key] is None and i == len(pairs) - 1:
                continue
            if not isinstance(pair[key], str):
                raise UserError(f"{name}: `{key}` of pair {i} must be a string, not {_kind(pair[key])}")
            found.append({"role": role, "content": pair[key]})
    return found


def _text(parts: Sequence[Any], where: str) -> str:
    """The text of a content that is one part."""
    kinds = sorted({str(part.get("type", "part without a type"))[:40] if isinstance(part, dict) else _kind(part) for part in parts})
    if kinds != ["text"] or any(part.get(key) for part in parts for key in (*MEDIA, "image_url", "input_audio", "video_url")):
        raise UserError(
            f"{where} holds {', '.join(kinds) or 'no part at all'}; ptf trains text only: leave such rows out with data.prepare, or data.on_bad_row: skip"
        )
    if len(parts) > 1 or not isinstance(parts[0].get("text"), str):
        raise UserError(f"{where} has {len(parts)} parts of text, and servers differ in how they join them: write one string with data.prepare")
    return parts[0]["text"]


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call must be an object with a function's `name` and `arguments`")
    arguments = parsed(function.get("arguments") or {}, f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: the arguments of {function['name']} must be an object, not {_kind(arguments)}")
    refuse_deep(arguments, f"{where}: the arguments of {function['name']}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """The row's `tools`: a list of objects, of JSON strings, or one JSON string of a list; none where that is empty."""
    tools = parsed(tools, "`tools`") if not isinstance(tools, str) or tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"`tools` must be a list of tools, or the JSON of one, not {_kind(tools)}")
    tools = [parsed(tool, f"`tools`: tool {i}") for i, tool in enumerate(tools)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UserError(f"`tools`: tool {i} must be an object, or the JSON of one, not {_kind(tool)}")
    refuse_deep(tools, "`tools`")
    return tools


def turns(text: str, name: str) -> str | list[Message]:
    """The messages of a text that is a conversation, `\\n\\nHuman: …\\n\\nAssistant: …`; any other text as it is. One that ends in `\\n\\nAssistant:` ends
    before the answer."""
    if not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return text
    _, *parts = TURN.split(text)
    found = [{"role": "user" if who == "Human" else "assistant", "content": said.removeprefix(" ")} for who, said in zip(parts[::2], parts[1::2], strict=True)]
    if found[-1]["role"] == "assistant" and not found[-1]["content"].strip():
        found.pop()
    for i, message in enumerate(found):
        if message["role"] != ("user", "assistant")[i % 2] or not message["content"].strip():
            raise UserError(
                f"`{name}` is a text of turns (Human:, Assistant:) that do not alternate, or of which turn {i} is empty: leave such rows out, or write messages"
            )
    return found


def parsed(value: Any, what: str) -> Any:
    """What a string says as JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{what} is not JSON that can be read ({str(e)[:80]}): {value[:80]!r}") from None


def without_nulls(value: Any) -> Any:
    """Without the keys that are null, at every depth; a map of a columnar file as an object. What a list holds stays."""
    if isinstance(value, list) and value and all(isinstance(v, tuple) for v in value):
        value = dict(value)
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def refuse_deep(value: Any, what: str) -> None:
    """Raises UserError where more than `DEEPEST` objects and lists are inside each other."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise UserError(f"{what}: more than {DEEPEST} objects and lists inside each other")
        level = [inner for v in level if isinstance(v, dict | list) for inner in (v.values() if isinstance(v, dict) else v)]
        depth += 1


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number", type(None): "null"}.get(
        type(value), type(value).__name__
    )
