"""A `.json` file, read piece by piece whatever its size.

It holds one array of objects, or one object with one such array (`{"data": [...]}`).

Only strings and brackets matter to find where an element ends. A scan for those cuts elements out of the text, and each
is parsed when its row is requested, like a line of JSON lines. A `.json` file that holds JSON lines is read as that.
"""

import re
from collections.abc import Iterator
from typing import IO

from ptf.data.sources.blocks import Lines, open_bytes, size_of
from ptf.errors import UserError

# A lone " begins a string whose end is not read yet.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
DEPTH = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
READ = 1 << 20
MAX_ELEMENT_BYTES = 1 << 28  # bytes of one element
BOM = b"\xef\xbb\xbf"


class Scanner:
    """Scans a text of JSON token by token; tokens are strings and brackets."""

    def __init__(self, uri: str, file: IO[bytes]) -> None:
        self.uri, self._file = uri, file
        # `_at`: the position after the last token in `_text`; `_read`: bytes of the file so far.
        self._text, self._at, self._read = b"", 0, 0
        self.line = 0  # line breaks before `_at`

    @property
    def position(self) -> int:
        """Return the number of bytes of the file up to the end of the last token."""
        return self._read - len(self._text) + self._at

    def token(self) -> tuple[bytes, bytes]:
        """Return the text between the last token and the next one, and that token, which is empty at the end of the
        file.
        """
        scan = self._at
        while (found := TOKEN.search(self._text, scan)) is None or found[0] == b'"':
            scan = (found.start() if found else len(self._text)) - self._at
            if len(self._text) - self._at > MAX_ELEMENT_BYTES:
                raise self._too_long()
            if not self._more(self._at):
                if found:
                    raise self.broken_off()
                before = self._text[self._at :]
                self._advance(len(self._text))
                return before, b""
        before = self._text[self._at : found.start()]
        self._advance(found.end())
        return before, found[0]

    def element(self, keep: bool = True) -> bytes:
        """Return the object or array that began with the last token; with `keep` false, skip it and return b""."""
        start, scan, depth = self._at - 1, self._at, 1
        while True:
            for found in TOKEN.finditer(self._text, scan):
                token = found[0]
                if token == b'"':
                    scan = found.start()
                    break
                scan = found.end()
                depth += DEPTH.get(token, 0)
                if not depth:
                    element = self._text[start:scan] if keep else b""
                    self._advance(scan)
                    return element
            if not keep:
                self._advance(scan)
                start = scan
            if len(self._text) - start > MAX_ELEMENT_BYTES:
                raise self._too_long()
            scan -= start
            if not self._more(start):
                raise self.broken_off()
            start = 0

    def error(self, what: str) -> UserError:
        """Return an error that names the file and the line."""
        return UserError(f"{self.uri}:{self.line + 1}: {what}")

    def broken_off(self) -> UserError:
        """Return the error for a file that is truncated."""
        return self.error("the file breaks off inside its JSON, in what begins or continues here")

    def _too_long(self) -> UserError:
        """Return the error for a value that is too long."""
        return self.error(f"a value has no end within {MAX_ELEMENT_BYTES >> 20} MiB; write the rows as JSON lines")

    def _more(self, keep: int) -> bool:
        """Read more of the file and drop the text before `keep`; return whether there was more."""
        more = self._file.read(max(READ, len(self._text) - keep))
        self._text, self._at, self._read = self._text[keep:] + more, self._at - keep, self._read + len(more)
        return bool(more)

    def _advance(self, end: int) -> None:
        """Move to `end`, and count the line breaks on the way."""
        self.line += self._text.count(b"\n", self._at, end)
        self._at = end


class JsonArray:
    """The rows of a `.json` file. Block n holds the elements that end in the n-th `lines_bytes` of the file.

    An earlier block starts again from the beginning.
    """

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes, self._size = uri, lines_bytes, size_of(uri)
        self._key = _key_of_rows(uri)
        self._open()

    def counts(self) -> None:
        """Return None: counting the rows would take reading the whole file."""

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._scanner.position / max(1, self._size)

    def _open(self) -> None:
        """Open the file at the beginning of its array of rows."""
        self._file = open_bytes(self._uri)
        self._scanner, self._first, self._done = Scanner(self._uri, self._file), True, False
        self._next = self._lines_before = 0
        opening = _root(self._scanner)
        if opening == b"{":
            for key, value in _fields(self._scanner):
                if value == b"[" and key == self._key:
                    break
                if value in DEPTH:
                    self._scanner.element(keep=False)

    def block(self, number: int) -> Lines | None:
        """Return a block of elements; None after the last."""
        if number < self._next:
            self.close()
            self._open()
        while True:
            lines = self._elements((self._next + 1) * self._lines_bytes)
            if lines is None:
                return None
            self._next += 1
            if self._next > number:
                return lines

    def _elements(self, end: int) -> Lines | None:
        """Return the elements that begin before byte `end`; None after the last."""
        if self._done:
            return None
        texts, numbers, start = [], [], self._lines_before
        while self._scanner.position < end and (element := self._element()) is not None:
            texts.append(element[0])
            numbers.append(element[1] - start)
        self._lines_before = self._scanner.line
        return Lines(texts, numbers, self._lines_before - start, sum(map(len, texts)))

    def _element(self) -> tuple[bytes, int] | None:
        """Return the next element and the lines before it; None after the last."""
        before, token = self._scanner.token()
        line = self._scanner.line
        if not token:
            raise self._scanner.broken_off()
        if token == b"]" and not before.strip():
            self._done = True
            self._raise_if_trailing_text()
            return None
        if token not in (b"{", b"[") or before.strip() != (b"" if self._first else b","):
            raise self._scanner.error("the array holds something else than objects with a comma between them")
        self._first = False
        return self._scanner.element(), line

    def _raise_if_trailing_text(self) -> None:
        """Raise UserError where an array is followed by more text."""
        if self._key is None:
            before, token = self._scanner.token()
            if before.strip() or token:
                raise self._scanner.error("there is more text after the end of the array; write the rows as JSON lines")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_lines(uri: str) -> bool:
    """Return whether a `.json` file holds one object after the other, which is JSON lines under another name."""
    with open_bytes(uri) as file:
        scanner = Scanner(uri, file)
        if _root(scanner) == b"[":
            return False
        scanner.element(keep=False)
        return scanner.token()[1] == b"{"


def _key_of_rows(uri: str) -> str | None:
    """Return the key of an object's only list of objects; None where the file is an array.

    Raises UserError where there is no such list, or several.
    """
    with open_bytes(uri) as file:
        scanner = Scanner(uri, file)
        if _root(scanner) == b"[":
            return None
        keys = []
        for key, value in _fields(scanner):
            if value == b"[":
                before, first = scanner.token()
                keys += [key] if first == b"{" and not before.strip() else []
                if first in (b"{", b"["):
                    scanner.element(keep=False)
                if first == b"]":
                    continue
            if value in DEPTH:
                scanner.element(keep=False)
    if len(keys) != 1:
        content = f"lists of objects under {', '.join(keys)}" if keys else "no list of objects"
        raise UserError(
            f"{uri} has {content}: a .json file must hold one array of objects, or one object with one such array; "
            "write JSON lines"
        )
    return keys[0]


def _root(scanner: Scanner) -> bytes:
    """Return the bracket that the file begins with."""
    before, token = scanner.token()
    if before.removeprefix(BOM).strip() or token not in (b"{", b"["):
        raise scanner.error("a .json file must begin with [ or {")
    return token


def _fields(scanner: Scanner) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the first token of each field of the object that began with the last token.

    The token is a whole string, an opening bracket, or b"" for a number or a word. After an opening bracket, the caller
    reads to its end before the next field.
    """
    before, token = scanner.token()
    while token != b"}":
        if not token.startswith(b'"') or before.strip() not in (b"", b","):
            raise scanner.error("not a JSON object") if token else scanner.broken_off()
        key = token[1:-1].decode("utf-8", "replace")
        before, token = scanner.token()
        if not before.lstrip().startswith(b":"):
            raise scanner.error("not a JSON object") if token else scanner.broken_off()
        if before.strip() != b":":  # a number or a word; the token is the next key, or the end
            yield key, b""
            before = b","
            continue
        yield key, token
        before, token = scanner.token()
    return
