"""Calls of an episode to the policy, and the ids of the next context.

A context is the text that a server would send: the conversation, rendered by the chat template. Among all calls of the
episode, the longest whose text (context and response) begins that text is continued: the ids are its context, the ids
that the policy sampled, and the ids of the new text. So what was sampled is never tokenized again, whether calls follow
each other, branch, or belong to several conversations. Where no call begins the text, it is encoded anew, and a new
training sample begins.

A response often comes back changed by the client: its tool calls written in another form, its thinking removed. Its
messages are recognised by their content, and if the template shows a response unchanged at that place, its text as
sampled takes the place of what the client sent (`history_restored`). Responses that cannot be continued for another
reason are counted (`history_reencoded`).

Whether a client has a response is not always certain: a connection may break after the last byte. A call whose response
counts as lost is continued by no other, until a conversation holds its response after all.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ptf.data.context import raise_if_unseen
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation
from ptf.errors import UserError

Message = Mapping[str, Any]
THINKING_ENDS = "</think>"
MANY_CHARACTERS = 1 << 16  # fewer are encoded in a moment
SENTINEL = "\ue000ptf{}\ue001"  # in a private area of Unicode: no text of a conversation


@dataclass(frozen=True, slots=True)
class CallInput:
    """The input of one call."""

    tokens: np.ndarray  # [c] int32
    text: str
    messages: Sequence[Message] = ()
    tools: Any = None


@dataclass(eq=False)
class Call:
    """One request to the policy, and what it answered."""

    number: int  # in the episode, from 0
    context: CallInput
    generation: Generation
    text: str  # the response as it is shown: without its end-of-turn token, and up to a stop string
    raw: str  # the text of all sampled ids
    complete: bool = True  # it ended by itself, not at the token limit
    trained: bool = True  # whether its tokens are trained: a response that never reached the client is not
    message: Message = field(default_factory=dict)  # as it was returned to the client
    received: bool = False  # the client has the response
    continued: bool = False  # a later context holds the response, and that of no other call

    @property
    def length(self) -> int:
        """Return the number of characters of context and response."""
        return len(self.context.text) + len(self.raw)

    def begins(self, text: str) -> bool:
        """Return whether a text begins with the context and the response."""
        return text.startswith(self.context.text) and text.startswith(self.raw, len(self.context.text))


def normalised(message: Message) -> str:
    """Return what identifies a message, however a client writes it: role, visible text and the values of tool calls."""
    text = str(message.get("content") or "")
    if message.get("role") == "assistant":
        text = text.rpartition(THINKING_ENDS)[2]
    calls = list[Any]()
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # a client may return what is not JSON
                arguments = json.loads(arguments or "{}")
        calls.append([function.get("name"), arguments])
    return json.dumps([message.get("role"), text.strip(), calls], sort_keys=True, ensure_ascii=False, default=str)


def path_keys(messages: Sequence[Message], tools: Any) -> list[bytes]:
    """Return a hash of each beginning of a conversation: of the tools and the messages up to each one."""
    key, keys = hashlib.sha256(json.dumps(tools, sort_keys=True, default=str).encode()).digest(), list[bytes]()
    for message in messages:
        key = hashlib.sha256(key + normalised(message).encode()).digest()
        keys.append(key)
    return keys


class NoRoom(UserError):
    """A context leaves no room for a response."""


class CallHistory:
    """The calls of one episode, from which contexts are made."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any], max_length: int) -> None:
        self.tokenizer, self.arguments = tokenizer, arguments
        # more are not encoded only to learn that they do not fit
        self.most_characters = max(MANY_CHARACTERS, max_length * tokenizer.longest_token)
        self.calls: list[Call] = []
        self.lost: list[tuple[Call, ...]] = []  # which may have been received after all, each with those of its request
        self.by_path: dict[bytes, list[Call]] = {}  # the conversation up to a response → the calls that gave it
        self.history_restored = self.history_reencoded = 0

    def add(self, call: Call) -> None:
        """Add a call whose response the client has."""
        self._regain(call)
        if call.received:
            return
        call.received = True
        self.calls.append(call)
        if call.context.messages and call.message:
            path = path_keys([*call.context.messages, call.message], call.context.tools)[-1]
            self.by_path.setdefault(path, []).append(call)

    def lose(self, calls: Sequence[Call]) -> bool:
        """Take back the calls of one request whose response the client does not have, so far as is known.

        Return False, and keep them, if a later context holds one of the responses.
        """
        if any(call.continued for call in calls):
            return False
        for call in calls:
            call.received = False
            self.calls.remove(call)
        self.lost.append(tuple(calls))
        return True

    def _regain(self, call: Call) -> None:
        """If a response counts as lost, count it as received, because the client has sent it back."""
        for together in [calls for calls in self.lost if call in calls]:
            self.lost.remove(together)
            for one in together:
                one.received = True
            self.calls += together

    def context(
        self, messages: Sequence[Message], tools: Any = None, arguments: Mapping[str, Any] | None = None
    ) -> CallInput:
        """Return the context of the next response to a conversation; `arguments` are the template's beside its own.

        Raises NoRoom if it is far too long, UserError if the template refuses the messages, or omits one of them.
        """
        arguments = {**self.arguments, **(arguments or {})}
        render = partial(self.tokenizer.render_text, generation_prompt=True, tools=tools, arguments=arguments)
        text = render(messages)
        known = self._known(messages, tools)
        call = self.longest(text)
        last = known[max(known)] if known else None
        if last is not None and not _is_same(call, last):  # the last known response is shown in another form
            other = ""
            with contextlib.suppress(UserError):  # harmony's template refuses channels in a message's content
                other = self._spliced(messages, render, known)
            continued = self.longest(other)
            if _is_same(continued, last):
                text, call = other, continued
                self.history_restored += 1
            else:
                self.history_reencoded += 1
        seen = call.context.messages if call is not None else ()
        since = len(seen) if list(messages[: len(seen)]) == list(seen) else 0
        raise_if_unseen(messages, text, self.tokenizer, tools, arguments, since=since)
        context = CallInput(self._ids(text, call), text, messages, tools)
        if call is not None and sum(_is_same(other, call) for other in self.calls) == 1:
            call.continued = True
        return context

    def longest(self, text: str) -> Call | None:
        """Return the call with the longest text that begins `text`; of equal ones, the latest."""
        found = [call for call in self.calls if call.context.text and call.begins(text)]
        return max(found, key=lambda call: (call.length, call.number), default=None)

    def _ids(self, text: str, call: Call | None) -> np.ndarray:
        rest = text[call.length :] if call is not None else text
        if len(rest) > self.most_characters:
            raise NoRoom(f"the context has {len(rest)} new characters, which data.seq_len has no room for")
        ids = self.tokenizer.encode(rest)
        return np.array(ids if call is None else [*call.context.tokens, *call.generation.sampled_ids, *ids], np.int32)

    def _known(self, messages: Sequence[Message], tools: Any) -> dict[int, Call]:
        """Return the calls that gave the responses of a conversation, by the responses' places."""
        known = dict[int, Call]()
        for i, key in enumerate(path_keys(messages, tools) if self.by_path else ()):
            calls = self.by_path.get(key, ())
            # those that a client would not have written itself
            lost = [c for c in calls if not c.received and (c.text.strip() or c.message.get("tool_calls"))]
            if lost and not any(call.received for call in calls):
                self._regain(lost[-1])
            if received := [call for call in calls if call.received]:
                known[i] = max(received, key=lambda call: call.number)
        return known

    def _spliced(self, messages: Sequence[Message], render: Callable[..., str], known: Mapping[int, Call]) -> str:
        """Return the conversation's text with the known responses as they were sampled; empty if the template would not
        show them so: it drops their thinking, or changes what stands around them. Raises UserError if it refuses
        them."""

        def rendered(contents: Mapping[int, str]) -> str:
            changed = {i: {"role": "assistant", "content": content} for i, content in contents.items()}
            return render([changed.get(i, message) for i, message in enumerate(messages)])

        texts = {i: shown(call, self.tokenizer) for i, call in known.items()}
        text = rendered(texts)
        if _is_same(self.longest(text), known[max(known)]):
            return text
        marks = {i: SENTINEL.format(i) for i in texts}
        # templates drop thinking on purpose
        text = "" if any(THINKING_ENDS in text for text in texts.values()) else rendered(marks)
        for i, mark in marks.items():
            text = text.replace(mark, texts[i]) if text.count(mark) == 1 else ""
        return text


def _is_same(call: Call | None, other: Call) -> bool:
    """Return whether a call has the same text as another: conversations that are continued cannot tell them apart."""
    return call is other or (
        call is not None and call.length == other.length and call.begins(other.context.text + other.raw)
    )


def shown(call: Call, tokenizer: Tokenizer) -> str:
    """Return a response's text as sampled, without its end-of-turn token."""
    ids = call.generation.sampled_ids
    return tokenizer.decode(ids[:-1] if call.generation.finished else ids)
