"""A conversation as samples: token ids, and which of them belong to the assistant's turns.

The served text is the training text. The span of a turn runs from the end of its generation prompt to its end-of-turn
token, and both are found by rendering the conversation up to there as a server would. Turns share a sample as long as
each render begins with the one before; where a template rewrites earlier turns (it drops old thinking, say), a new
sample starts. A span or a context that cannot be verified is an error, never a guess.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ptf.data.completion import INSIDE, complete_answer
from ptf.data.context import raise_if_unseen
from ptf.data.document import Document
from ptf.data.incremental_encode import common_prefix_length, encode_incrementally
from ptf.data.messages import LARGEST, THOUGHTS, called_function
from ptf.data.rendering import WAYS_OUT
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

TrainOn = str  # "assistant", "last", "all", or "field:NAME"
FIELD = "field:"
WEIGHT = "weight"  # key of a message that says how much its turn counts
SWITCHES = ("loss", "train", "training", "trainable", "loss_mask", "step_loss_mask")  # keys that say whether it counts
AMBIGUOUS = {  # keys of a message that say what is trained in a way that is not read, and what they mean
    "mask": "which some tools read as trained and others as left out",
    **dict.fromkeys(("train_detail", "training_detail"), "which trains parts of a turn"),
}


@dataclass(frozen=True, slots=True)
class AssistantSpan:
    """One response of the assistant as served: the ids up to its end-of-turn token; those of the response itself
    begin at `start`."""

    ids: list[int]
    start: int
    weight: float


def chat_samples(
    messages: Any,
    tokenizer: Tokenizer,
    source: str = "",
    train_on: TrainOn = "assistant",
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
    scored: bool = False,
) -> list[Document]:
    """Return the samples of one conversation, in which each turn that `train_on` names is trained exactly once, or is
    `scored` only, which an empty one may be.

    "assistant": all turns of the assistant. "last": the last of them. "field:NAME": each of them counts as much as its
    key NAME. "all": every token up to the end of the last turn, except the first token. `arguments` are the row's own
    arguments of the chat template.
    """
    messages, counted = trained_turns(in_turns(clean(messages), tokenizer), train_on, scored)
    documents = served_turns(messages, counted, tokenizer, tools, arguments)
    if train_on == "all":
        return _all_of([ids for ids, _ in documents], source)
    return [_sample(ids, turns, source) for ids, turns in documents]


def served_turns(
    messages: Sequence[Mapping[str, Any]],
    counted: Mapping[int, float],
    tokenizer: Tokenizer,
    tools: Any,
    arguments: Mapping[str, Any] | None = None,
) -> list[tuple[list[int], list[AssistantSpan]]]:
    """Return the given turns in as few documents as can show them all: for each document its ids and its turns.

    `counted` maps a turn's message index to its weight, in order. Raises UserError for a turn that cannot be rendered
    as it would be served, or whose context is not shown.
    """
    tools = json.loads(tools) if isinstance(tools, str) else tools or None
    documents: list[tuple[list[int], list[AssistantSpan]]] = []
    served: list[tuple[str, str]] = []
    refused = None  # the first error; it is raised after the errors of the turns before it
    verified = 0  # number of messages whose text the prompt of the previous turn shows
    for i in counted:
        try:
            turn = served_turn(messages, i, tokenizer, tools, arguments)
            extends_previous = bool(served) and turn[0].startswith(served[-1][0])
            raise_if_unseen(
                messages[:i],
                turn[0],
                tokenizer,
                tools,
                arguments,
                since=verified if extends_previous else 0,
                where=f", turn {i}",
            )
        except UserError as error:
            refused = error
            break
        served.append(turn)
        verified = i
    encoded = iter(
        encode_incrementally([text for prompt, answer in served for text in (prompt, prompt + answer)], tokenizer)
    )
    for (i, weight), (_, answer), context, through in zip(counted.items(), served, encoded, encoded, strict=False):
        turn = _turn(i, answer, context, through, weight, tokenizer, bool(messages[i].get("tool_calls")))
        if documents and len(documents[-1][0]) <= turn.start and turn.ids[: len(documents[-1][0])] == documents[-1][0]:
            documents[-1] = (turn.ids, [*documents[-1][1], turn])
        else:
            documents.append((turn.ids, [turn]))
    if refused:
        raise refused
    return documents


def in_turns(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return messages, which are `clean`, as `data.consecutive_turns` says of two in a row that the assistant wrote.

    Raises UserError where it does not say it, or where two that it joins cannot be one turn.
    """
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        last = turns[-1] if turns else message
        if not turns or tokenizer.rendering.consecutive == "keep" or {last["role"], message["role"]} != {"assistant"}:
            turns.append(message)
            continue
        if tokenizer.rendering.consecutive == "error":
            raise UserError(
                f"messages {i - 1} and {i} are both of the assistant, and may be one turn or two: "
                "data.consecutive_turns: join makes one of them, keep makes each a turn that ends by itself"
            )
        # the thinking of the first is that of the turn; the second has none of its own
        ours, others = (
            {key: v for key, v in m.items() if key not in ("content", "tool_calls", *left_out)}
            for m, left_out in ((last, THOUGHTS), (message, ()))
        )
        if last.get("tool_calls") or ours != others or "</think>" in message["content"]:
            raise UserError(
                f"messages {i - 1} and {i} cannot be joined to one turn (data.consecutive_turns): a call, "
                "thinking or a key of one would be lost or moved; write them as one message with data.prepare"
            )
        texts = [m["content"] for m in (last, message) if m["content"].strip()]
        turns[-1] = {**last, **message, "content": "\n\n".join(texts)}
    return turns


def trained_turns(
    messages: list[dict[str, Any]], train_on: TrainOn, scored: bool = False
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Return the messages as the template receives them, and the weights of the assistant's turns that count, by index.

    A weight is the message's own `weight` times that of `train_on`, and 0 where another key of it says that it is not
    trained. Raises UserError where no turn counts, or for a blank one that does and is not to be `scored` only.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError("the conversation has no assistant turn: nothing to train on")
    field = train_on.removeprefix(FIELD) if train_on.startswith(FIELD) else None
    keys = {key for message in messages for key in message} - {field}
    if unclear := next((key for key in AMBIGUOUS if key in keys), None):
        raise UserError(
            f"a message has a `{unclear}`, {AMBIGUOUS[unclear]}: write `loss` (true or false) instead with data.prepare"
        )
    own, read = dict.fromkeys(turns, 1.0), [key for key in (WEIGHT, *SWITCHES) if key in keys]
    for key in read:
        messages, marks = _marked(messages, key, turns, 1.0, at_most=LARGEST if key == WEIGHT else 1.0)
        own = {i: own[i] * mark for i, mark in marks.items()}
    if field is not None:
        messages, marks = _marked(messages, field, turns, 1.0 if field in (WEIGHT, *SWITCHES) else None)
    elif train_on == "all" and any(weight != 1 for weight in own.values()):
        raise UserError(f"data.train_on: all trains every token, yet a message has a `{read[-1]}` of its own")
    else:
        marks = dict.fromkeys(turns[-1:] if train_on == "last" else turns, 1.0)
    counted = {i: mark * own[i] for i, mark in marks.items() if mark * own[i]}
    if any(weight > LARGEST for weight in counted.values()):
        raise UserError("the product of a message's weights is too large; lower `weight` or the field")
    if not counted:
        what = field if field is not None and any(own.values()) else " or ".join(read)
        raise UserError(f"no turn of the conversation counts: `{what}` is 0 or false on every one")
    for i in counted if not scored else ():
        content = str(messages[i].get("content") or "")
        inside = INSIDE.fullmatch(content)  # the text beside the thinking
        if not ((inside[2] if inside else content).strip() or messages[i].get("tool_calls")):
            raise UserError(f"message {i} (assistant) is empty: there is nothing to train but the end of the turn")
    return messages, counted


def _marked(
    messages: list[dict[str, Any]],
    name: str,
    turns: Sequence[int],
    default: float | None = None,
    at_most: float = LARGEST,
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Return the messages without their key `name`, and the number that it holds for each of the assistant's turns.

    `default` stands for a missing key. With `at_most` 1, the number is 0 or 1.
    """
    marks: dict[int, Any] = {
        i: message.get(name, default if i in turns else None) for i, message in enumerate(messages)
    }
    for i, mark in marks.items():
        allowed = isinstance(mark, bool | int | float) and (mark in (0, 1) if at_most == 1 else 0 <= mark <= LARGEST)
        if i in turns and not allowed:
            raise UserError(
                f"message {i} (assistant): `{name}`, which says how much it counts, must be true, "
                f"false or {'0 or 1' if at_most == 1 else 'a number from 0'}, not {repr(mark)[:60]}"
            )
        if i not in turns and mark:
            raise UserError(
                f"message {i} ({messages[i]['role']}): only what the assistant says can be trained, "
                f"yet its `{name}` is {repr(mark)[:60]}"
            )
    return [{key: value for key, value in message.items() if key != name} for message in messages], {
        i: float(marks[i]) for i in turns
    }


def _sample(ids: list[int], spans: Sequence[AssistantSpan], source: str) -> Document:
    """Return one document as a sample in which the given turns are trained."""
    weights = np.zeros(len(ids), np.float32)
    for turn in spans:
        weights[turn.start : len(turn.ids)] = turn.weight
    return Document(np.array(ids, np.int32), weights, source)


def _all_of(samples: Sequence[list[int]], source: str) -> list[Document]:
    """Return samples in which every token is trained once.

    The tokens that a sample shares with the start of the one before it have weight 0.
    """
    result, before = [], samples[0][:1]
    for ids in samples:
        weights = np.ones(len(ids), np.float32)
        weights[: common_prefix_length(before, ids)] = 0.0
        result.append(Document(np.array(ids, np.int32), weights, source))
        before = ids
    return result


class Refused(UserError):
    """An error whose message names the turn already."""


def _refusal(i: int, tokenizer: Tokenizer, what: str) -> UserError:
    return Refused(f"chat template {tokenizer.template_name}, turn {i}: {what}")


def served_turn(
    messages: Sequence[Mapping[str, Any]],
    i: int,
    tokenizer: Tokenizer,
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return the text that a server shows the model before message i (an assistant's), and the response's text.

    The response is as the template writes it. With `data.response_rendering: append`, where the template does not
    show the response after the prompt, it is assembled by ptf.data.completion. Raises UserError for a turn that is not
    shown as it would be served.
    """

    fail = partial(_refusal, i, tokenizer)
    if i == 0:
        raise fail(
            "the assistant speaks first, so there is no prompt to answer; put a system or user message before it"
        )
    closing = tokenizer.closings[bool(messages[i].get("tool_calls"))].borrowed
    try:
        prompt = tokenizer.render_text(messages[:i], True, tools, arguments)
        through = tokenizer.render_text(messages[: i + 1], False, tools, arguments)
        try:
            if not through.startswith(prompt):
                start = common_prefix_length(prompt, through)
                ends, written = prompt[start:][:60], through[start:][:60]
                raise fail(
                    f"the generation prompt ends in {ends!r}, the turn is rendered as {written!r}: "
                    f"that is never served. To train it, {WAYS_OUT}"
                )
            answer = through[len(prompt) :]
            _verify(messages[:i], messages[i], answer, through, tokenizer, tools, arguments, fail)
            return prompt, answer + closing
        except UserError:
            if not tokenizer.rendering.served:
                raise
        thinking, answer, shows = complete_answer(
            messages[:i], messages[i], prompt, tokenizer, tools, arguments or {}, fail
        )
        if shows is not None:
            _verify(messages[:i], shows, answer, None, tokenizer, tools, arguments, fail)
        return prompt, thinking + answer + closing
    except Refused:
        raise
    except UserError as e:
        raise UserError(f"turn {i}: {e}") from None


def _verify(
    before: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    answer: str,
    through: str | None,
    tokenizer: Tokenizer,
    tools: Any,
    arguments: Mapping[str, Any] | None,
    fail: Any,
) -> None:
    """Raise the error that `fail` makes unless the response shows all parts of the message."""
    parts = _parts(message)
    if through is None and any(rest for _, rest in parts):
        through = tokenizer.render_text([*before, message], False, tools, arguments)
    for text, rest in parts:
        if text not in answer or (rest and _renders_as(str(through), [*before, rest], tokenizer, tools, arguments)):
            raise fail(f"the template leaves out {text[:60]!r}. To train it, {WAYS_OUT}")


def _turn(
    i: int, answer: str, context: list[int], ids: list[int], weight: float, tokenizer: Tokenizer, calls: bool
) -> AssistantSpan:
    """Return turn i up to where a server would stop, from the ids of its prompt and of prompt and response."""

    fail = partial(_refusal, i, tokenizer)
    if not context:
        raise fail("nothing comes before the response, so all of the sample would be trained")
    # Where a token spans the end of the prompt, a server never sees that token: it continues the prompt's ids.
    if ids[: len(context)] != context:
        ids = context + tokenizer.encode(answer)
    stops = set(tokenizer.stop_ids)
    end = next((k for k in range(len(context), len(ids)) if ids[k] in stops), None)
    if end is None:
        raise fail(f"no end-of-turn token; known ones are {[tokenizer.decode([k]) for k in tokenizer.stop_ids]}")
    # what follows any last turn: a line break, an end of the document, or (Command-R) the next generation prompt
    last = tokenizer.closings[calls].last
    known = last[next((n for n, k in enumerate(last) if k in stops), len(last)) + 1 :]
    rest = ids[end + 1 :]
    said = [k for k in rest if k not in stops]
    if (
        said
        and rest != known
        and tokenizer.decode(rest).strip() != tokenizer.decode(known).strip()
        and tokenizer.decode(said).strip()
    ):
        raise fail(f"the end-of-turn token {tokenizer.decode([ids[end]])!r} stands inside the response")
    return AssistantSpan(ids[: end + 1], len(context), weight)


def _parts(message: Mapping[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the parts of a message's text, each with the message without it.

    That message is None where the part can only be in the content. White space around a part belongs to the template,
    which may also format the text between the tags of thinking inside the content.
    """
    pieces, calls = re.split("(</?think>)", message["content"]), message.get("tool_calls") or []
    parts = [(message.get(key) or "", {k: v for k, v in message.items() if k != key}) for key in THOUGHTS]
    parts += [
        (pieces[k], {**message, "content": "".join(pieces[:k] + pieces[k + 1 :])}) for k in range(0, len(pieces), 2)
    ]
    for k, call in enumerate(calls):
        others = {"tool_calls": calls[:k] + calls[k + 1 :]} if len(calls) > 1 else {}
        parts.append(
            (call.get("function", call)["name"], {key: v for key, v in message.items() if key != "tool_calls"} | others)
        )
    result = [(text.strip(), rest) for text, rest in parts if text.strip()]
    return [(result[0][0], None)] if len(result) == len(pieces) == 1 and message["content"].strip() else list(result)


def _renders_as(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Any,
    arguments: Mapping[str, Any] | None,
) -> bool:
    """Return whether the template renders the messages as exactly this text."""
    try:
        return tokenizer.render_text(messages, False, tools, arguments) == text
    except UserError:
        return False


def clean(messages: Any) -> list[dict[str, Any]]:
    """Return messages as servers pass them to a template.

    They have no null keys (parquet writes them) and no null content; tool calls are objects of type function whose
    arguments are objects.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("`messages` must be a list of messages, and not empty")
    cleaned: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {i} must be an object with a `role`")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | None) or (content is None and not calls):
            raise UserError(f"message {i} ({message['role']}): `content` must be a string; ptf trains text only")
        cleaned.append({**{key: v for key, v in message.items() if v is not None}, "content": content or ""})
        if calls:
            cleaned[-1]["tool_calls"] = [_clean_call(i, call) for call in calls]
    return cleaned


def _clean_call(i: int, call: Any) -> dict[str, Any]:
    """Return a tool call of message i in the form of type function. Raises UserError for an invalid call."""
    function = called_function(call, f"message {i}")
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}
