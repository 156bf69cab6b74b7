"""Chat completions: what a request may ask, and the form of the reply, whole or in pieces."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ptf.data.rendering import valid_items
from ptf.errors import UserError
from ptf.rl.endpoint.answer_stream import AnswerParts
from ptf.rl.endpoint.http_message import HttpError

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # what would change the tokens, and the values that do not
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "ignore_eos", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("functions", "stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    **{"logit_bias": ({},), "response_format": ({"type": "text"},), "modalities": (["text"],)},
    **{"add_generation_prompt": (True,), "verbosity": ("medium",)},
}
WITHOUT_EFFECT = (  # on tokens
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "request_id", "priority", "cache_salt"),
)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")  # the job's own values win
READ = (
    *("model", "messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("logprobs", "chat_template_kwargs", "parallel_tool_calls", *SAMPLING),
)
MAX_MESSAGES, MAX_CHOICES, MAX_STOPS = 4096, 128, 16


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for `n` responses to a conversation."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    n: int
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    sampling: Mapping[str, Any]  # what the client asked for of SAMPLING
    template_arguments: Mapping[str, Any]
    one_call: bool  # sampling ends with the first tool call


def raise_if_unsupported(
    given: Mapping[str, Any], read: Sequence[str], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raise HttpError (400) for the first field that would change what is sampled, or that nobody knows."""
    for name, value in given.items():
        if name in read or name in WITHOUT_EFFECT or value is None or value in neutral.get(name, ()):
            continue
        near = get_close_matches(name, (*read, *neutral, *WITHOUT_EFFECT), 1, 0.85) if name not in neutral else ()
        hint = f"did you mean {near[0]}?" if near else "leave it out: responses have the policy's own distribution"
        raise HttpError(400, f"{name[:80]} is not supported here; {hint}", name[:80])


def parse_chat(given: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body. Raises HttpError (400) with the name of what cannot be served."""
    raise_if_unsupported(given, READ)
    arguments = given.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise HttpError(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    try:
        valid_items(arguments)
    except UserError as error:
        raise HttpError(400, str(error), "chat_template_kwargs") from None
    messages = given.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise HttpError(400, f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    tools = given.get("tools") if given.get("tool_choice") != "none" else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise HttpError(400, "tools must be a list of objects", "tools")
    stops = given.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    texts = isinstance(stops, list | tuple) and all(isinstance(stop, str) and stop for stop in stops)
    if not texts or len(stops) > MAX_STOPS:
        raise HttpError(400, f"stop must be a text, or at most {MAX_STOPS} texts, none of them empty", "stop")
    options = given.get("stream_options") or {}
    return ChatRequest(
        str(given.get("model") or "policy"),
        [with_text(i, message) for i, message in enumerate(messages)],
        tools or None,
        whole_number(given, "n", 1, MAX_CHOICES) or 1,
        whole_number(given, "max_completion_tokens") or whole_number(given, "max_tokens"),
        tuple(stops),
        bool(given.get("stream")),
        bool(isinstance(options, dict) and options.get("include_usage")),
        bool(given.get("logprobs")),
        {name: given[name] for name in SAMPLING if given.get(name) is not None},
        arguments,
        given.get("parallel_tool_calls") is False and bool(tools),
    )


def whole_number(given: Mapping[str, Any], name: str, least: int = 1, most: int = 1 << 31) -> int | None:
    """Return a field of a request, None where it is not given. Raises HttpError (400) for another value."""
    if (value := given.get(name)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise HttpError(400, f"{name} must be a whole number from {least} to {most}, not {str(value)[:40]}", name)
    return value


def with_text(i: int, message: Any) -> dict[str, Any]:
    """Return message i with its content as one text: clients may send it in parts. Raises HttpError for other kinds."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise HttpError(400, f"messages[{i}] must be an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise HttpError(400, f"messages[{i}]: only parts of type text are supported", "messages")
        content = "".join(texts)
    if not isinstance(content, str | None):
        raise HttpError(
            400, f"messages[{i}]: content must be a text or parts, not a {type(content).__name__}", "messages"
        )
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise HttpError(400, f"messages[{i}]: tool_calls must be a list of objects", "messages")
    return {**message, "content": content or ("" if message["role"] == "assistant" else content)}


def call_of(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in its own form."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def message_of(parts: AnswerParts, identifiers: Sequence[str]) -> dict[str, Any]:
    """Return a response as a message."""
    calls = [
        call_of(identifier, call.name, call.arguments)
        for identifier, call in zip(identifiers, parts.tool_calls, strict=True)
    ]
    return {
        "role": "assistant",
        "content": "" if parts.content is None and not calls else parts.content,
        **_present(reasoning_content=parts.thinking, tool_calls=calls),
    }


def delta_of(thinking: str, content: str, tool_calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return what is new of a response."""
    calls = [{"index": i, **call} for i, call in enumerate(tool_calls)]
    return _present(reasoning_content=thinking, content=content, tool_calls=calls)


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def event(data: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
