"""Harmony, of gpt-oss: a response is several messages, each with a channel and perhaps a recipient.

A response begins after `<|start|>assistant`:

    <|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel, as in the chat template. What is on the channel `analysis` is thinking;
a message for a recipient is a call, and all other messages are content. `divide` separates the thinking; what it leaves
is content with the calls after it, each written as the template does.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.data.tool_calls import json_text, openers
from ptf.data.tool_calls.protocol import MALFORMED, ParsedAnswer, ToolCall, answer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CALL = f"{START}assistant to="  # how a call begins, as the template writes it
BEGINS = re.compile(r"\s*(?:to=[^\s<]+\s*)?<\|channel\|>|\s*to=[^\s<]+\s*<\|message\|>")  # without `<|start|>assistant`
NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS, ASSISTANT = "functions.", "assistant"


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message of a response; `closed` unless the response's end cuts it."""

    channel: str
    recipient: str | None
    text: str
    closed: bool


def messages(text: str) -> Iterator[HarmonyMessage]:
    """Yield the messages of a response. Text without a header is a message of the channel `final`; a header that the
    end cuts is none."""
    position = 0
    if not BEGINS.match(text):
        position = openers.first(text, (START,))
        if position:
            yield HarmonyMessage("final", None, text[:position], position < len(text))
    while position < len(text):
        body = text.find(MESSAGE, position)
        if body < 0:
            return
        header = text[position:body]
        channel, recipient = NAMED.search(header), RECIPIENT.search(header)
        body += len(MESSAGE)
        called = recipient[1] if recipient and recipient[1] != ASSISTANT else None
        end = openers.first(text, (*ENDS, START), json_text.after(text, body) if called else body)
        yield HarmonyMessage(channel[1] if channel else "final", called, text[body:end], end < len(text))
        mark = next((mark for mark in ENDS if text.startswith(mark, end)), "")
        position = end + len(mark)
        if position < len(text) and not text.startswith(START, position):  # after the end of a message
            begin = openers.first(text, (START,), position)
            yield HarmonyMessage("final", None, text[position:begin], begin < len(text))
            position = begin


def divide(text: str, *, ended: bool) -> tuple[str | None, str | None]:
    """Return the thinking of a response, None without any, and what else it says.

    The second is None while nothing is known. Unless the response has `ended`, the beginning of a mark at its end is
    left out.
    """
    if not ended:
        if _may_begin_header(text):
            return None, None
        text = openers.without_begun(text, (*ENDS, START, CHANNEL))
    thinking, content, calls = list[str](), "", ""
    for message in messages(text):
        if message.recipient is not None:
            calls += f"{CALL}{message.recipient}{CHANNEL}commentary json{MESSAGE}{message.text}"
            calls += "<|call|>" if message.closed else ""
        elif message.channel == "analysis":
            thinking.append(message.text)
        elif not calls:
            content += message.text
    return "\n".join(thinking) if thinking else None, content + calls


def _may_begin_header(text: str) -> bool:
    """Return whether the beginning of a response may become a header or plain text."""
    begun = text.lstrip()
    if CHANNEL.startswith(begun) or "to=".startswith(begun):
        return True
    return begun.startswith("to=") and not BEGINS.match(text) and START not in text


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
    """Split a response; its thinking is left out.

    Without a call it is its messages' text, without the headers. A call whose arguments are not JSON makes the whole
    text content.
    """
    content, calls = "", list[ToolCall]()
    try:
        for message in messages(text):
            if message.recipient is not None:
                value = json_text.write(json_text.read(message.text))
                calls.append(ToolCall(message.recipient.removeprefix(FUNCTIONS), value))
            elif message.channel != "analysis" and not calls:
                content += message.text
    except MALFORMED:
        return answer(text, text, ())
    return ParsedAnswer(content or None, tuple(calls))


def certain(text: str) -> str:
    """Return the text before the first header."""
    if BEGINS.match(text) or _may_begin_header(text):
        return ""
    return openers.before(text, (START,))
