"""Requests of OpenAI's Responses API, read as requests for chat completions.

Sessions, retries, splicing and delivery are those of chat completions: a request becomes a ChatRequest, and what the
policy samples is written as a response object of this API by ptf.rl.endpoint.response_form. Items become messages as
follows: the items of one response (reasoning, text, function calls) become one message of the assistant, and a
function's output a message of the tool.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.rl.endpoint import chat as chat_completions
from ptf.rl.endpoint.http_message import HttpError

Message = Mapping[str, Any]

NEUTRAL = {  # what is not supported, and the values that ask for nothing
    **chat_completions.NEUTRAL,
    **dict.fromkeys(("conversation", "max_tool_calls", "prompt"), ()),
    **{"background": (False,), "context_management": ([],), "truncation": ("disabled",)},
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}, {"summary": None}),
    "text": ({}, {"format": {"type": "text"}}, {"format": None}),
}
INCLUDED = ("reasoning.encrypted_content",)  # reasoning is returned as text, which makes it superfluous
SAME = (  # as in chat completions
    *("model", "stream", "tool_choice", "top_logprobs", "parallel_tool_calls", "chat_template_kwargs"),
    *chat_completions.SAMPLING,
)
READ = ("input", "instructions", "previous_response_id", "tools", "max_output_tokens", "include", "stream_options")
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request for a response."""

    chat: chat_completions.ChatRequest
    messages: Sequence[Message]  # the conversation without `instructions`, which hold for one response only
    store: bool  # whether a later request may continue the response by its id
    echo: Mapping[str, Any]  # what the response repeats of the request


def parse_responses(given: Mapping[str, Any], earlier: Callable[[str], Sequence[Message]]) -> ResponsesRequest:
    """Return the request in a body. Raises HttpError (400) with the name of what cannot be served.

    `earlier` returns the conversation up to the end of the response with an id, or raises HttpError.
    """
    chat_completions.raise_if_unsupported(given, (*READ, *SAME), NEUTRAL)
    for name in given.get("include") or ():
        if name not in INCLUDED:
            raise HttpError(400, f"include: {str(name)[:80]} is not supported here", "include")
    instructions, previous = given.get("instructions"), given.get("previous_response_id")
    for name in ("instructions", "previous_response_id"):
        if not isinstance(given.get(name), str | None):
            raise HttpError(400, f"{name} must be a text", name)
    messages = [*(earlier(previous) if previous else ()), *messages_of(given.get("input"))]
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat = chat_completions.parse_chat(
        {
            **{name: given[name] for name in SAME if name in given},
            "messages": [*system, *messages],
            "tools": tools_of(given.get("tools")) or None,
            "max_tokens": chat_completions.whole_number(given, "max_output_tokens"),
        }
    )
    echo = {
        "instructions": instructions,
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
        "previous_response_id": previous,
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
    }
    return ResponsesRequest(chat, messages, given.get("store") is not False, echo)


def tools_of(given: Any) -> list[dict[str, Any]]:
    """Return the tools in the form of chat completions. Raises HttpError for tools that are not functions.

    `strict` is not passed on: no response is forced into the form of a tool's parameters.
    """
    if not isinstance(given, list | None):
        raise HttpError(400, "tools must be a list of objects", "tools")
    tools = []
    for i, tool in enumerate(given or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else None
            raise HttpError(
                400, f"tools[{i}]: only tools of type function are supported, not {str(kind)[:80]!r}", "tools"
            )
        if not isinstance(tool.get("name"), str):
            raise HttpError(400, f"tools[{i}] must have a name", "tools")
        kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return the messages of an input. Raises HttpError for kinds of items and parts that are not supported."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise HttpError(400, "input must be a text or a list of items, and not empty", "input")
    messages, thinking = list[dict[str, Any]](), ""
    for i, item in enumerate(given):
        message, kind = _message(i, item)
        if kind == "reasoning":
            thinking += message["content"]
            continue
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant" and not thinking:
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thinking and message["role"] != "assistant":
            raise HttpError(400, f"input[{i}]: what follows reasoning must be the response that it led to", "input")
        messages.append({**message, "reasoning_content": thinking} if thinking else message)
        thinking = ""
    if thinking:
        raise HttpError(400, "input ends with reasoning: the response that it led to must follow it", "input")
    return messages


def _message(i: int, item: Any) -> tuple[dict[str, Any], str]:
    """Return item i as a message by itself, and its kind."""
    if not isinstance(item, dict):
        raise HttpError(400, f"input[{i}] must be an object", "input")
    kind = item.get("type") or "message"
    if kind == "message":
        if item.get("role") not in ROLES:
            raise HttpError(400, f"input[{i}]: role must be one of {', '.join(ROLES)}", "input")
        return {"role": item["role"], "content": _text(i, item.get("content"))}, kind
    if kind == "reasoning":
        return {"role": "assistant", "content": _text(i, item.get("content") or item.get("summary") or "")}, kind
    if kind == "function_call":
        parts = [_required(i, item, name) for name in ("call_id", "name", "arguments")]
        return {"role": "assistant", "content": None, "tool_calls": [chat_completions.call_of(*parts)]}, kind
    if kind == "function_call_output":
        call = _required(i, item, "call_id")
        return {"role": "tool", "tool_call_id": call, "content": _text(i, item.get("output"))}, kind
    raise HttpError(400, f"input[{i}]: items of type {str(kind)[:80]!r} are not supported", "input")


def _required(i: int, item: Mapping[str, Any], name: str) -> str:
    if not isinstance(item.get(name), str):
        raise HttpError(400, f"input[{i}] must have a text {name}", "input")
    return item[name]


def _text(i: int, content: Any) -> str:
    """Return a content, a text or a list of parts of text, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(400, f"input[{i}] must be a text or a list of parts", "input")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            raise HttpError(400, f"input[{i}]: parts of type {str(kind)[:80]!r} are not supported, only text", "input")
    return "".join(part["text"] for part in content)
