"""The text of a response while it is sampled: its thinking, its content up to a stop string, and its tool calls.

However the tokens arrive, the pieces add up to what the whole response gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from ptf.data.tokenizer import Tokenizer
from ptf.data.tool_calls import Format, ToolCall
from ptf.data.trajectory import Generation

BEGINS, ENDS = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """A response as a client gets it."""

    thinking: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]


class AnswerStream:
    """Splits a response into its parts, token by token.

    `form` is the format of tool calls; without tools it is None. `opened`: the context ends inside of thinking.
    `divide` separates the thinking of a format that has channels instead of `<think>`. With `one_call` the token that
    completes the first tool call is the last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: Format | None,
        tools: Sequence[Any] | None,
        stops: Sequence[str],
        opened: bool,
        divide: Callable[..., tuple[str | None, str | None]] | None = None,
        one_call: bool = False,
    ) -> None:
        self.tokenizer, self.form, self.tools, self.stops, self.opened = tokenizer, form, tools, stops, opened
        self.divide, self.one_call = divide, one_call
        self.backend = tokenizer.hf.backend_tokenizer
        self.pieces = DecodeStream(skip_special_tokens=False)
        self.text = ""  # of the tokens so far, but for bytes of an incomplete character
        self.held: list[int] = []  # tokens whose text is not known yet
        self.stopped = False  # whether a stop string has ended the response
        self.sent_thinking = self.sent_content = 0  # characters

    def feed(self, token: int) -> None:
        """Take the next sampled token; the token that completes a stop string is the last."""
        if token in self.tokenizer.stop_ids:  # it ends the response, and is not shown
            return
        try:
            piece = self.pieces.step(self.backend, token)
        except Exception as error:  # tokenizers raises no other type
            if "Invalid prefix" not in str(error):
                raise
            # bytes of no character, whose text changes with the next token: begin anew behind them
            self.pieces = DecodeStream(skip_special_tokens=False)
            piece = self.pieces.step(self.backend, token)
        self.held.append(token)
        if piece is None:  # the token ends inside a character
            piece = self.tokenizer.decode(self.held).rstrip("\ufffd") if self.stops else ""
            if not self._completes(self.stops, piece):
                return
        self.held.clear()
        self.stopped = self._completes(self.stops, piece)
        called = self.one_call and self.form is not None and self._completes(self.form.ends, piece)
        self.text += piece
        self.stopped = self.stopped or (called and self._has_a_call())

    def _completes(self, texts: Sequence[str], piece: str) -> bool:
        recent = self.text[-max(map(len, texts), default=1) :] + piece
        return any(text in recent for text in texts)

    def _has_a_call(self) -> bool:
        """Return whether the text has a tool call that nothing after it can change."""
        body = (self.divide(self.text, ended=True) if self.divide else self._split(self.text))[1]
        return self.form is not None and body is not None and bool(self.form.parse(f"{body}\n.", self.tools).tool_calls)

    def new_parts(self) -> tuple[str, str]:
        """Return the thinking and the content that are certain now, and were not returned before."""
        if self.stopped:
            return "", ""  # the whole response has them
        text = self.text[: len(self.text) - self._held_back()]
        thinking, body = self.divide(text, ended=False) if self.divide else self._split(text)
        if body is None:
            return "", ""
        return self.rest_of(thinking or "", self.form.certain(body) if self.form else body)

    def rest_of(self, thinking: str, content: str) -> tuple[str, str]:
        """Return what of this thinking and this content was not returned before."""
        rest = thinking[self.sent_thinking :], content[self.sent_content :]
        self.sent_thinking = max(self.sent_thinking, len(thinking))
        self.sent_content = max(self.sent_content, len(content))
        return rest

    def whole(self, generation: Generation) -> AnswerParts:
        """Return the parts of a whole response."""
        ids = generation.sampled_ids
        text = self.tokenizer.decode(ids[:-1] if generation.finished else ids)
        if not text.startswith(self.text):  # broken bytes, which decode otherwise together; clients have the pieces
            text = self.text
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        thinking, body = self.divide(text, ended=True) if self.divide else self._split(text)
        if body is None and not self.opened and not text.lstrip().startswith(BEGINS):
            body = text  # it could have begun with thinking
        if body is None:  # the thinking has no end
            return AnswerParts(text.strip().removeprefix(BEGINS).strip("\n"), None, ())
        if self.form is None:
            return AnswerParts(thinking, body or None, ())
        parsed = self.form.parse(body, self.tools)
        return AnswerParts(thinking, parsed.content, parsed.tool_calls)

    def _split(self, text: str) -> tuple[str | None, str | None]:
        """Return the thinking (None without any) and what follows it (None while the thinking may go on)."""
        begins = text.lstrip()
        if not self.opened and not begins.startswith(BEGINS):
            return None, None if BEGINS.startswith(begins) else text  # white space too may stand before thinking
        thinking, end, body = text.partition(ENDS)
        if not end:
            return None, None
        body = body.lstrip("\n")
        return thinking.strip().removeprefix(BEGINS).strip("\n"), body

    def _held_back(self) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        return max(
            (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0,
        )
