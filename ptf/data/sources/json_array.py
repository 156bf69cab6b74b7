"""A `.json` file, read piece by piece whatever its size.

It holds one array of objects, or one object with one such array (`{"data": [...]}`).

Python's decoder finds where a value ends, in as much text as that takes. An element is kept as its bytes, which are
parsed when its row is requested, like a line of JSON lines. A `.json` file that holds JSON lines is read as that.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from ptf.data.sources.blocks import open_bytes
from ptf.data.sources.in_order import InOrder
from ptf.data.sources.json_values import NESTED
from ptf.data.sources.jsonl import Jsonl
from ptf.errors import UserError

DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # for the ends of values
SPACE = re.compile(r"[ \t\n\r]*")
READ = 1 << 20
LOOKAHEAD = 16  # characters after which no number, word or escape goes on (-Infinity, \ud83d\ude00)
MAX_VALUE = 1 << 28  # characters of one value


class Text:
    """The text of a file of JSON, from what is read next; what is taken is dropped."""

    def __init__(self, uri: str, file: IO[bytes]) -> None:
        self._uri, self._file = uri, file
        # Bytes that are not UTF-8 pass through, to be an error of the row that holds them.
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text, self._at = "", 0
        self.position = self.line = 0  # bytes and line breaks that were taken
        if self.peek() == "\ufeff":  # a byte order mark
            self.take()

    def peek(self) -> str:
        """Skip white space and return the next character, which is empty at the end of the file."""
        while True:
            space = SPACE.match(self._text, self._at)
            self.take(len(space[0]) if space else 0)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> bytes:
        """Return the next characters and move behind them."""
        taken = self._text[self._at : self._at + count].encode("utf-8", "surrogateescape")
        self._at += count
        self.position += len(taken)
        self.line += taken.count(b"\n")
        return taken

    def value(self) -> bytes:
        """Return the value that begins here and move behind it."""
        while True:
            start, failed = self._at, ""
            try:
                _, end = DECODER.raw_decode(self._text, start)
            except json.JSONDecodeError as e:
                # For a string without an end, the decoder names the place where it begins.
                end, failed = len(self._text) if e.msg.startswith("Unterminated string") else e.pos, e.msg
            except RecursionError:
                raise self.error(NESTED) from None
            beyond = len(self._text) - end
            if beyond < LOOKAHEAD and self._more():
                continue
            if not failed:
                return self.take(end - start)
            if not beyond or (beyond < LOOKAHEAD and not self._text.rstrip().endswith(("]", "}"))):
                raise self.broken_off()
            raise self.error(f"not JSON: {failed}")

    def members(self, close: str) -> Iterator[None]:
        """Stop at each member of the list or object that begins here; the caller reads it to its end."""
        self.take()
        more = self.peek() != close
        while more:
            self.peek()
            yield
            if (found := self.peek()) not in (",", close):
                raise self.error(f"not JSON: no comma and no {close} after a value") if found else self.broken_off()
            if more := found == ",":
                self.take()
        self.take()

    def fields(self) -> Iterator[str]:
        """Stop at the value of each key of the object that begins here; the caller reads it to its end."""
        for _ in self.members("}"):
            key = self.value()
            if not key.startswith(b'"') or (found := self.peek()) not in (":", ""):
                raise self.error("not a JSON object")
            if not found:
                raise self.broken_off()
            self.take()
            self.peek()
            yield key[1:-1].decode("utf-8", "replace")

    def error(self, what: str) -> UserError:
        """Return an error that names the file and the line."""
        return UserError(f"{self._uri}:{self.line + 1}: {what}")

    def broken_off(self) -> UserError:
        """Return the error for a file that is truncated."""
        return self.error("the file breaks off inside its JSON, in what begins or continues here")

    def _more(self) -> bool:
        """Read more of the file; return whether there was more."""
        left = self._text[self._at :]
        if len(left) > MAX_VALUE:
            raise self.error(f"a value has no end within {MAX_VALUE >> 20} MiB; write the rows as JSON lines")
        data = self._file.read(max(READ, len(left)))
        self._text, self._at = left + self._decode(data, not data), 0
        return bool(data)


class JsonArray(InOrder):
    """The rows of a `.json` file that is an array, or that has one under a key."""

    def __init__(self, uri: str, lines_bytes: int, key: str | None) -> None:
        self._key = key
        super().__init__(uri, lines_bytes)

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._at / max(1, self._size)

    def _open(self) -> None:
        super()._open()
        self._text = Text(self._uri, self._file)
        if self._text.peek() == "{":
            for key in self._text.fields():
                if key == self._key and self._text.peek() == "[":
                    break
                self._text.value()
        self._at = self._text.position

    def _rows(self) -> Iterator[tuple[bytes, int]]:
        text = self._text
        for _ in text.members("]"):
            if text.peek() not in ("{", ""):
                raise text.error("the array holds something else than objects")
            line, element = text.line, text.value()
            self._at, self._line = text.position, text.line
            yield element, line
        if self._key is None and text.peek():
            raise text.error("there is more text after the end of the array; write the rows as JSON lines")


def open_json(uri: str, lines_bytes: int) -> JsonArray | Jsonl:
    """Open a `.json` file. Raises UserError where it does not hold one list of objects, or JSON lines."""
    keys: list[str] = []  # of an object's lists of objects
    with open_bytes(uri) as file:
        text = Text(uri, file)
        if text.peek() == "[":
            return JsonArray(uri, lines_bytes, None)
        if text.peek() != "{":
            raise text.error("a .json file must begin with [ or {")
        for key in text.fields():
            if text.peek() != "[":
                text.value()
                continue
            for i, _ in enumerate(text.members("]")):
                keys += [key] if i == 0 and text.peek() == "{" else []
                text.value()
        if text.peek() == "{":
            return Jsonl(uri, lines_bytes)  # one object after the other
        if text.peek():
            raise text.error("there is more text after the end of the object; write the rows as JSON lines")
    if len(keys) != 1:
        content = f"lists of objects under {', '.join(keys)}" if keys else "no list of objects"
        raise UserError(
            f"{uri} has {content}: a .json file must hold one array of objects, or one object with one such array; "
            "write JSON lines"
        )
    return JsonArray(uri, lines_bytes, keys[0])
