"""A conversation as samples: ids, and which of them the assistant said.

The one idea: the served text is the training text. The span of a turn runs from the end of its generation prompt to its end-of-turn token, both
found by rendering the conversation up to there as a server would. Turns share a sample as long as each render begins with the one before;
where a template rewrites what was said (drops old thinking, say) a new sample starts. What cannot be verified is an error, never a guess.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ptf.data.growing import GrowingText
from ptf.data.sample import Sample
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

TrainOn = Literal["assistant", "last"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer as served: everything up to its end-of-turn token, of which the ids from `start` on are its own."""

    ids: list[int]
    start: int


def chat_samples(messages: Any, tokenizer: Tokenizer, source: str = "", train_on: TrainOn = "assistant", tools: Any = None) -> list[Sample]:
    """The samples of one conversation; each of its assistant turns (or only the last) is trained exactly once."""
    messages = clean(messages)
    tools = json.loads(tools) if isinstance(tools, str) else tools or None
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError("the conversation has no assistant turn: nothing to train on")
    samples: list[tuple[list[int], list[Turn]]] = []
    growing = GrowingText(tokenizer)
    for i in turns if train_on == "assistant" else turns[-1:]:
        turn = served_turn(messages, i, growing, tools)
        if samples and len(samples[-1][0]) <= turn.start and turn.ids[: len(samples[-1][0])] == samples[-1][0]:
            samples[-1] = (turn.ids, [*samples[-1][1], turn])
        else:
            samples.append((turn.ids, [turn]))
    return [_sample(ids, spans, source) for ids, spans in samples]


def _sample(ids: list[int], spans: Sequence[Turn], source: str) -> Sample:
    weights = np.zeros(len(ids), np.float32)
    for turn in spans:
        weights[turn.start : len(turn.ids)] = 1.0
    return Sample(np.array(ids, np.int32), weights, source)


def served_turn(messages: Sequence[Mapping[str, Any]], i: int, growing: GrowingText, tools: Any = None) -> Turn:
    """Message i, an assistant's, with all that a server would have shown the model before it."""
    tokenizer = growing.tokenizer

    def fail(what: str) -> UserError:
        return UserError(f"chat template {tokenizer.template_name}, turn {i}: {what}")

    if i == 0:
        raise fail("the assistant speaks first, so there is no prompt to answer; put a system or user message before it")
    prompt = tokenizer.render_text(messages[:i], True, tools)
    through = tokenizer.render_text(messages[: i + 1], False, tools)
    if not through.startswith(prompt):
        at = next(k for k, (a, b) in enumerate(zip(prompt, through + "\0", strict=False)) if a != b)
        raise fail(f"the generation prompt ends in {prompt[at:][:60]!r}, the turn is rendered as {through[at:][:60]!r}: that is never served")
    answer = through[len(prompt) :]
    for said in _said(messages[i]):
        if said not in answer:
            raise fail(f"the template leaves out {said[:60]!r}")
    context, ids = growing.encode(prompt), growing.encode(through)
    if not context:
        raise fail("nothing comes before the answer, so all of the sample would be trained")
    if ids[: len(context)] != context:  # a token spans the end of the prompt; a server never sees that one: it continues the prompt's ids
        ids = context + tokenizer.encode(answer)
    stops = set(tokenizer.stop_ids)
    end = next((k for k in range(len(context), len(ids)) if ids[k] in stops), None)
    if end is None:
        raise fail(f"no end-of-turn token; known ones are {[tokenizer.decode([k]) for k in tokenizer.stop_ids]}")
    if tokenizer.decode([k for k in ids[end + 1 :] if k not in stops]).strip():
        raise fail(f"the end-of-turn token {tokenizer.decode([ids[end]])!r} stands inside the answer")
    return Turn(ids[: end + 1], len(context))


def _said(message: Mapping[str, Any]) -> list[str]:
    """What must be found again in the render of a turn. Thinking inside the content may be laid out anew, so only what follows it counts."""
    thoughts = [message.get(key) for key in ("reasoning_content", "thinking")]
    names = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    return [part.strip() for part in [*thoughts, (message.get("content") or "").split("</think>")[-1], *names] if part and part.strip()]


def clean(messages: Any) -> list[dict[str, Any]]:
    """Messages as servers hand them to a template: no null keys (parquet makes them), no null content, arguments of tool calls as objects."""
    if not isinstance(messages, list) or not messages:
        raise UserError("`messages` must be a list of messages, and not empty")
    return [_clean(i, message) for i, message in enumerate(messages)]


def _clean(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"message {i} must be an object with a `role`")
    if not isinstance(message.get("content"), str | None) or (message.get("content") is None and not message.get("tool_calls")):
        raise UserError(f"message {i} ({message['role']}): `content` must be a string; ptf trains text only")
    message = {key: value for key, value in message.items() if value is not None} | {"content": message.get("content") or ""}
    if message.get("tool_calls"):
        message["tool_calls"] = [_clean_call(i, call) for call in message["tool_calls"]]
    return message


def _clean_call(i: int, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"message {i}: a tool call must be an object with a function's `name` and `arguments`")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise UserError(f"message {i}: the arguments of {function['name']} are not JSON: {arguments[:80]!r}") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
