"""The assistant's tokens found a second way: by characters, and by asking the template what it does with other words.

The one idea: each part of a turn (thinking, content, a call's name and arguments) is replaced by a word that occurs nowhere else, and the turn is
rendered again. Words that do not come out are what the template drops; what both renders end in closes the turn. Spans are characters of
rendered text, turns share a sample while the text of one begins the next, and tokens are told by their offsets. Imports nothing of ptf.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Masked = tuple[list[int], list[bool]]  # a sample: ids, and which of them are trained
Reason = Literal["no assistant turn", "speaks first", "template refuses", "never served", "left out", "nothing before", "stop inside", "endless"]

USER = {"role": "user", "content": "1"}
ANSWER = {"role": "assistant", "content": "2"}
CALL = ANSWER | {"content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "3"}}}]}


class Refusal(Exception):
    """Why a conversation cannot be trained on, and at which message."""

    reason: Reason

    def __init__(self, turn: int | None, reason: Reason, detail: str = ""):
        super().__init__(turn, reason, detail)
        self.turn, self.reason, self.detail = turn, reason, detail


@dataclass(frozen=True)
class Span:
    """An answer: all text up to its end-of-turn token, and the character it starts at."""

    text: str
    start: int


class Oracle:
    def __init__(self, hf: Any):
        self.hf = hf
        self.added = {i: token.content for i, token in hf.added_tokens_decoder.items()}
        special = either({token.content for token in hf.added_tokens_decoder.values() if token.special} | set(hf.all_special_tokens))
        closing = {hf.eos_token} - {None}
        for answer, which in ((ANSWER, 0), (CALL, -1)):  # Phi closes the document after the turn, DeepSeek the calls before it
            try:
                ending = common_ending(self._render([USER, answer]), self._render([USER, disguised(answer, "\ue000")[0]]))
            except Exception:  # this template knows no calls
                continue
            closing.add(special.findall(ending)[which])
        self.stops = either(closing)

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, last: bool = False) -> list[Masked]:
        """The samples of a conversation, of which only the last turn is trained if `last`. Raises Refusal."""
        cleaned = [served_message(message) for message in messages]
        turns = [i for i, message in enumerate(cleaned) if message["role"] == "assistant"]
        if not turns:
            raise Refusal(None, "no assistant turn")
        groups: list[list[Span]] = []
        for span in [self._span(cleaned[:i], cleaned[i], tools) for i in (turns[-1:] if last else turns)]:
            if groups and len(groups[-1][-1].text) <= span.start and span.text.startswith(groups[-1][-1].text):
                groups[-1].append(span)
            else:
                groups.append([span])
        return [sample for group in groups for sample in self._samples(group)]

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, tools: Any = None) -> str:
        return self.hf.apply_chat_template(list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False)

    def _span(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any], tools: Any) -> Span:
        turn = len(before)
        if not before:
            raise Refusal(turn, "speaks first")
        try:
            asked, told = self._render(before, True, tools), self._render([*before, message], False, tools)
            other, words = disguised(message, next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in told))
            echo = self._render([*before, other], False, tools)
        except Exception as e:
            raise Refusal(turn, "template refuses", str(e)) from None
        start = len(asked)
        if told[:start] != asked:
            raise Refusal(turn, "never served", repr(asked[-40:]))
        for word, part in words.items():
            if word not in echo[start:]:
                raise Refusal(turn, "left out", part)
        if not asked:
            raise Refusal(turn, "nothing before")
        stop = self.stops.search(told, start)
        if stop is None:
            raise Refusal(turn, "endless")
        if self.stops.sub("", told[stop.end() :]).strip():
            raise Refusal(turn, "stop inside", stop[0])
        return Span(told[: stop.end()], start)

    def _samples(self, spans: Sequence[Span]) -> Iterator[Masked]:
        """Spans whose texts begin one another: one sample, but that no token may lie over the start of an answer, since a server continues the prompt's ids.
        There the text is cut and the sample ends; for the turns after it the ids before have changed."""
        while spans:
            ids, places = self._tokens(spans[-1].text)
            cut = next((n for n, span in enumerate(spans) if places[first(places, span.start) - 1][1] > span.start), None)
            group, spans = (spans, ()) if cut is None else (spans[: cut + 1], spans[cut + 1 :])
            if cut is not None:
                text, start = group[-1].text, group[-1].start
                (ids, places), (more, beyond) = self._tokens(text[:start]), self._tokens(text[start:])
                ids, places = ids + more, places + [(a + start, b + start) for a, b in beyond]
            mask = [False] * len(ids)
            for span in group:
                for n in range(first(places, span.start), first(places, len(span.text))):
                    mask[n] = True
            yield ids, mask

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each. Some added tokens swallow white space beside them, which is not theirs."""
        encoded = self.hf(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        places = [(a, min(b, a + len(self.added[i])) if i in self.added else b) for i, (a, b) in pairs]
        return encoded["input_ids"], places


def first(places: Sequence[tuple[int, int]], character: int) -> int:
    """The number of the first token that starts at a character or after it."""
    return bisect_left(places, character, key=lambda place: place[0])


def common_ending(a: str, b: str) -> str:
    n = next((n for n, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b)))
    return a[len(a) - n :]


def either(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def served_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a server makes of a message: nulls are absent, but content is a string; a call's arguments are an object."""
    message = {**{key: value for key, value in message.items() if value is not None}, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        message["tool_calls"] = [with_function(call, {**function(call), "arguments": arguments(call)}) for call in message["tool_calls"]]
    return message


def disguised(message: Mapping[str, Any], mark: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The message with words in place of all its parts, and which part each word stands for."""
    words: dict[str, str] = {}

    def word(part: str) -> str:
        words[new := f"w{len(words)}{mark}"] = part
        return new

    other = dict(message)
    for key in ("reasoning_content", "thinking"):
        if str(message.get(key) or "").strip():
            other[key] = word(key)
    pieces = re.split("(</?think>)", message["content"])  # white space and these tags stay as they are: templates look for them
    pieces[::2] = [re.sub(r"\S(.*\S)?", lambda _: word("content"), piece, count=1, flags=re.DOTALL) for piece in pieces[::2]]
    other["content"] = "".join(pieces)
    if message.get("tool_calls"):
        other["tool_calls"] = [
            with_function(call, {**function(call), "name": word("call"), "arguments": {key: word("argument") for key in arguments(call)}})
            for call in message["tool_calls"]
        ]
    return other, words


def function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function", call)


def with_function(call: Mapping[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}  # servers take no bare ones


def arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    value = function(call).get("arguments") or {}
    return json.loads(value) if isinstance(value, str) else value
