"""The assistant's tokens found a second way: by characters, and by asking the template what it does with other words.

Each part of a turn (thinking, content, a call's name and arguments) and of its context is replaced by a word that
occurs nowhere else, and rendered again. Words that do not come out are what the template drops. Where a turn ends is
known by hand (tests/data/templates.py). Spans are characters of rendered text, turns share a sample while the text of
one begins the next, and tokens are told by their offsets. Imports nothing of ptf.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Masked = tuple[list[int], list[bool]]  # a sample: ids, and which of them are trained
Reason = Literal[
    "no assistant turn",
    "blank",
    "speaks first",
    "template refuses",
    "never served",
    "left out",
    "nothing before",
    "stop inside",
    "endless",
    "unseen context",
    "thinking closed",
    "no tags",
    "call not served",
]


LONG = 3000  # characters
ANSWER = {"role": "assistant", "content": "v"}


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
    def __init__(self, hf: Any, known: Any, **options: Any):
        """`known`: what a person knows, a Case of templates.py. `options`: what the template is handed besides messages
        and tools."""
        self.hf, self.known, self.options = hf, known, options
        self.added = {i: token.content for i, token in hf.added_tokens_decoder.items()}
        self.stops = either({known.answer, known.call or known.answer, hf.eos_token} - {None})

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        last: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Masked]:
        """The samples of a conversation, of which only the last turn is trained if `last`. Raises Refusal."""
        self.given = {**self.options, **(arguments or {})}
        cleaned = [served_message(message) for message in messages]
        turns = [i for i, message in enumerate(cleaned) if message["role"] == "assistant"]
        if not turns:
            raise Refusal(None, "no assistant turn")
        turns = turns[-1:] if last else turns
        for i in turns:
            thought, closed, behind = cleaned[i]["content"].partition("</think>")
            if not (behind if closed else thought).strip() and not cleaned[i].get("tool_calls"):
                raise Refusal(i, "blank")
        groups: list[list[Span]] = []
        for span in [self._span(cleaned[:i], cleaned[i], tools or None) for i in turns]:
            if groups and len(groups[-1][-1].text) <= span.start and span.text.startswith(groups[-1][-1].text):
                groups[-1].append(span)
            else:
                groups.append([span])
        return [sample for group in groups for sample in self._samples(group)]

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, tools: Any = None) -> str:
        if self.known.text_arguments:

            def written(call):
                return with_function(
                    call, {**function(call), "arguments": json.dumps(arguments(call), ensure_ascii=False)}
                )

            messages = [
                {**m, "tool_calls": list(map(written, m["tool_calls"]))} if m.get("tool_calls") else m for m in messages
            ]
        return self.hf.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **self.given
        )

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
        start, borrowed = len(asked), self.known.borrowed.get(bool(message.get("tool_calls")), "")
        answer, refusal = told[start:], None
        if told[:start] != asked:
            refusal = Refusal(turn, "never served", repr(asked[-40:]))
        elif dropped := [part for word, part in words.items() if word not in echo[start:]]:
            refusal = Refusal(turn, "left out", dropped[0])
        if refusal and not self.known.served:
            raise refusal
        if refusal:
            answer = self._put_together(before, message, asked, tools)
        if not self.known.allow_unseen and (unseen := self._unseen(before, tools, asked)):
            raise Refusal(turn, "unseen context", unseen)
        if not asked:
            raise Refusal(turn, "nothing before")
        text = asked + answer + borrowed
        stop = self.stops.search(text, start)
        if stop is None:
            raise Refusal(turn, "endless")
        if self.stops.sub("", text[stop.end() :]).strip() not in ("", self.known.behind):
            raise Refusal(turn, "stop inside", stop[0])
        return Span(text[: stop.end()], start)

    def _put_together(
        self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any], asked: str, tools: Any
    ) -> str:
        """Thinking and answer behind the served prompt, as docs/data.md says it: the thinking between its tags, then
        the turn without it as the template writes it, or the content as it stands where the template does not write
        it."""
        turn, content = len(before), message["content"]
        thought = next(
            (message[key] for key in ("reasoning_content", "thinking") if str(message.get(key) or "").strip()), ""
        ).strip()
        bare = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
        if not thought and "</think>" in content:
            inside, _, behind = content.partition("</think>")
            thought, bare["content"] = inside.lstrip().removeprefix("<think>").strip(), behind.lstrip()
        tail = asked[len(asked.rstrip()) :]
        if thought and asked.rstrip().endswith("</think>"):
            raise Refusal(turn, "thinking closed")
        opened = asked.rstrip().endswith("<think>")
        if thought and not opened and "<think>" not in self.hf.chat_template:
            raise Refusal(turn, "no tags")
        lead = (
            f"{thought}{tail}</think>{tail}{tail}" if opened else f"<think>\n{thought}\n</think>\n\n" if thought else ""
        )
        try:
            shown, told = self._render(before, False, tools), self._render([*before, bare], False, tools)
            plain = self._render([*before, ANSWER], False, tools)
            other, words = disguised(bare, "\ue000")
            echo = self._render([*before, other], False, tools)
        except Exception as e:
            raise Refusal(turn, "template refuses", str(e)) from None
        plain_too = self._render([*before, {**ANSWER, "content": "w"}], False, tools)
        differ = next((n for n, (a, b) in enumerate(zip(plain, plain_too, strict=False)) if a != b), len(plain))
        heads: list[int] = [
            at + len(header) for header in self.known.headers if (at := plain.rfind(header, 0, differ)) >= 0
        ]
        head: int = max([*heads, *([len(shown)] if plain.startswith(shown) else []), 0])
        served = asked.startswith(shown) and asked.startswith(plain[:head]) and head >= len(shown)
        body = (
            re.sub(r"\A\s*(<think>)?\s*</think>\s*", "", told[head:])
            if served and told.startswith(plain[:head])
            else ""
        )
        if bare.get("tool_calls"):
            if not body:
                raise Refusal(turn, "call not served")
        elif not body or bare["content"].strip() not in body:
            return (
                lead
                + self.known.before_answer
                + bare["content"]
                + self.known.answer * (False not in self.known.borrowed)
            )
        if dropped := [part for word, part in words.items() if word not in echo[head:]]:
            raise Refusal(turn, "left out", dropped[0])
        return lead + body

    def _unseen(self, before: Sequence[Mapping[str, Any]], tools: Any, asked: str) -> str | None:
        """What of the context neither comes out nor makes a difference: contents (an assistant's after its thinking,
        and not beside calls), the names of calls and of tools."""
        places: list[tuple[str, Any]] = [("tool", k) for k in range(len(tools or ()))]
        for i, message in enumerate(before):
            ours = message["role"] == "assistant"
            said = message["content"].split("</think>")[-1] if ours else message["content"]
            if said.strip() and not (ours and message.get("tool_calls")):
                places.append(("content", i))
            places += [("call", (i, k)) for k in range(len(message.get("tool_calls") or ()))]
        words = {place: f"w{n}\ue001" for n, place in enumerate(places)}
        shown = self._with_words(before, tools, words)
        for place, word in words.items():
            if shown is not None and word in shown:
                continue
            alone = self._with_words(before, tools, {place: word})
            if alone == asked:
                return str(place)
        return None

    def _with_words(
        self, before: Sequence[Mapping[str, Any]], tools: Any, words: Mapping[tuple[str, Any], str]
    ) -> str | None:
        messages: list[Any] = [dict(message) for message in before]
        named: list[Any] = list(tools or ())
        for (kind, at), word in words.items():
            if kind == "tool":
                named[at] = with_function(named[at], {**function(named[at]), "name": word})
            elif kind == "content":
                thought, end, _ = (
                    messages[at]["content"].rpartition("</think>")
                    if messages[at]["role"] == "assistant"
                    else ("", "", "")
                )
                messages[at]["content"] = thought + end + word
            else:
                i, k = at
                calls = list(messages[i]["tool_calls"])
                calls[k] = with_function(calls[k], {**function(calls[k]), "name": word})
                messages[i]["tool_calls"] = calls
        try:
            return self._render(messages, True, named or None)
        except Exception:  # a template that refuses it has read it
            return None

    def _samples(self, spans: Sequence[Span]) -> Iterator[Masked]:
        """Spans whose texts begin one another: one sample, as long as the ids of each prompt by itself begin it, since
        a server continues those. Where they do not the text is cut and the sample ends;
        for the turns after it the ids before have changed."""
        while spans:
            ids, places = self._tokens(spans[-1].text)
            cut = next(
                (n for n, span in enumerate(spans) if not self._continues(spans[-1].text, span.start, ids, places)),
                None,
            )
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

    def _continues(self, text: str, start: int, ids: list[int], places: list[tuple[int, int]]) -> bool:
        """Whether the ids of the text up to a character are its first ids. Of a long one, only what stands behind its
        last added token is encoded again."""
        end = first(places, start)
        begin = next((n for n in range(end - 1, -1, -1) if ids[n] in self.added), 0) if start > LONG else 0
        return self._tokens(text[places[begin][0] if begin else 0 : start])[0] == ids[begin:end]

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each. Some added tokens swallow white space beside them, which is not theirs."""
        encoded = self.hf(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        places = [(a, min(b, a + len(self.added[i])) if i in self.added else b) for i, (a, b) in pairs]
        return encoded["input_ids"], places


def first(places: Sequence[tuple[int, int]], character: int) -> int:
    """The number of the first token that starts at a character or after it."""
    return bisect_left(places, character, key=lambda place: place[0])


def either(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def served_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a server makes of a message: nulls are absent, but content is a string; a call's arguments are an object."""
    message = {
        **{key: value for key, value in message.items() if value is not None},
        "content": message.get("content") or "",
    }
    if message.get("tool_calls"):
        message["tool_calls"] = [
            with_function(call, {**function(call), "arguments": arguments(call)}) for call in message["tool_calls"]
        ]
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
    # white space and these tags stay as they are: templates look for them
    pieces = re.split("(</?think>)", message["content"])
    pieces[::2] = [
        re.sub(r"\S(.*\S)?", lambda _: word("content"), piece, count=1, flags=re.DOTALL) for piece in pieces[::2]
    ]
    other["content"] = "".join(pieces)
    if message.get("tool_calls"):
        other["tool_calls"] = []
        for call in message["tool_calls"]:
            made = {**function(call), "name": word("call")}
            made["arguments"] = {key: word("argument") for key in arguments(call)}
            other["tool_calls"].append(with_function(call, made))
    return other, words


def function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function", call)


def with_function(call: Mapping[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    # servers take no bare ones
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    value = function(call).get("arguments") or {}
    return json.loads(value) if isinstance(value, str) else value
