"""Probe texts and conversations, which show how a tokenizer and its chat template behave.

They tell how the template closes a turn, in which form it takes the arguments of tool calls, and at which tokens a text
splits.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.data.tokenizer import Tokenizer

Message = Mapping[str, Any]

PROBES = (
    "Hello, world!",
    "  two  spaces\tand a tab",
    "\n\nnewlines\n",
    "naïve café Ångström ﬁ ①",
    "数学 русский العربية हिन्दी",
    "👩‍👩‍👧 emoji",
    "1234567.89e-10",
    "don't DON'T it's",
    "<|im_end|></s><|endoftext|>",
    "a\u0301 \u00e1",
    "x=  y;\r\n",
    "\u200b\ufeff",
)
_USER = {"role": "user", "content": "3"}
_RESULT = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "f"}


class Closing(NamedTuple):
    """How a template closes a turn."""

    special: list[int]  # the special ids that end the turn
    last: list[int]  # all ids that follow the last turn of a conversation
    # what is written only when the next message follows (GLM: the tag of its role), up to the token at which a server
    # stops; "" where the turn has an end of its own
    borrowed: str = ""


def closings_of(tokenizer: "Tokenizer") -> dict[bool, Closing]:
    """Return how the template closes a turn that calls no tool (False), and one that calls a tool (True)."""
    added = tokenizer.hf.added_tokens_decoder.items()
    special = {*tokenizer.hf.all_special_ids, *(i for i, token in added if token.special)}
    closings = {}
    for calls, then in ((False, _USER), (True, _RESULT)):
        last, inside = _ending(tokenizer, calls), _ending(tokenizer, calls, then)
        pairs = enumerate(zip(last, inside, strict=False))
        both = next((n for n, (a, b) in pairs if a != b), min(len(last), len(inside)))
        own = [i for i in last[:both] if i in special] or [i for i in last if i in special]
        borrowed = [i for i in inside if i in special][:1]
        if own or not borrowed:
            closings[calls] = Closing(own, last)
            continue
        text, continued = (_probe(tokenizer, [*_exchange("1", calls), *after]) for after in ((), (then,)))
        stop = tokenizer.decode(borrowed)
        start = len(text) if continued.startswith(text) else continued.rindex(stop)
        end = continued.index(stop, start) + len(stop)
        closings[calls] = Closing(borrowed, last, continued[start:end])
    return closings


def _probe(tokenizer: "Tokenizer", messages: Sequence[Message]) -> str:
    """Return the render of a probe conversation, with a system message where the template requires one."""
    try:
        return tokenizer.render_text(messages, False)
    except UserError:  # some templates require a system message
        return tokenizer.render_text([{"role": "system", "content": "0"}, *messages], False)


def _ending(tokenizer: "Tokenizer", calls: bool, *then: Message) -> list[int]:
    """Return the ids that follow a turn whatever its content: the common ending of two turns that differ.

    `then`: what comes after the turn and ends both, too.
    """
    if not tokenizer.hf.chat_template:
        return []
    try:
        texts = [_probe(tokenizer, [*_exchange(word, calls), *then]) for word in ("1", "2")]
        a, b = (tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in texts)
    except UserError:  # the template supports no such turn
        return []
    n = 0
    while a != b and a[-1 - n] == b[-1 - n]:
        n += 1
    return a[len(a) - n :]


def cuts_of(tokenizer: "Tokenizer") -> dict[str, int]:
    """Return the stop ids, by their text, at which a text splits into two parts that are encoded independently.

    Added tokens split a text like this; the probes verify it, and where they disagree no cut is returned.
    """
    cuts = {tokenizer.decode([i]): i for i in tokenizer.stop_ids if i in tokenizer.hf.added_tokens_decoder}
    pairs = list(zip(PROBES, PROBES[1:] + PROBES[:1], strict=True))
    texts = [t for cut in cuts for a, b in pairs for t in (a + cut + b, a + cut, cut + b)]
    ids = iter(tokenizer.hf(texts, add_special_tokens=False)["input_ids"] if texts else [])
    split = zip((i for i in cuts.values() for _ in PROBES), ids, ids, ids, strict=True)
    agree = all(left[-1] == right[0] == i and whole == left[:-1] + right for i, whole, left, right in split)
    return cuts if agree else {}


def takes_text_arguments(tokenizer: "Tokenizer") -> bool:
    """Return whether the template takes the arguments of tool calls as JSON text only (DeepSeek-V3).

    This is found by rendering a probe.
    """
    call = _exchange("1", True)
    for as_text in (False, True):
        try:
            tokenizer.apply_template(with_text_arguments(call) if as_text else call, False, None, {})
            return as_text
        except (TemplateError, TypeError, KeyError, IndexError):
            continue
    return False


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls as JSON text."""
    return [
        {
            **m,
            "tool_calls": [
                {**call, "function": {**f, "arguments": json.dumps(f.get("arguments") or {}, ensure_ascii=False)}}
                for call in m["tool_calls"]
                for f in (call["function"],)
            ],
        }
        if m.get("tool_calls")
        else m
        for m in messages
    ]


def _exchange(word: str, calls: bool) -> list[Message]:
    """Return a conversation of one turn, which says the word or calls a tool with it."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": word}}}
    answer = {"content": "", "tool_calls": [call]} if calls else {"content": word}
    return [{"role": "user", "content": "1"}, {"role": "assistant", **answer}]
