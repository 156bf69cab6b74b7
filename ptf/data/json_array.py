"""A `.json` file: one array of objects, or one object with one such array (`{"data": [...]}`), read piece by piece whatever its size.

The one idea: only strings and brackets matter to find where an element ends, so elements are cut out of the text by a scan for those, and are parsed
where a row is asked for, as lines of JSON are. A `.json` file that holds JSON lines is read as that.
"""

import re
from collections.abc import Iterator
from typing import IO

from ptf.data.blocks import Lines, open_bytes, size_of
from ptf.errors import UserError

TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)  # a lone " begins a string of which the end is not read yet
DEPTH = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
READ = 1 << 20
LONGEST = 1 << 28  # bytes of one element
BOM = b"\xef\xbb\xbf"


class Scanner:
    """A text of JSON, token by token: strings and brackets."""

    def __init__(self, uri: str, file: IO[bytes]) -> None:
        self.uri, self._file = uri, file
        self._text, self._at, self._read = b"", 0, 0  # `_at`: behind the last token in `_text`; `_read`: bytes of the file so far
        self.line = 0  # line breaks before `_at`

    @property
    def position(self) -> int:
        """Bytes of the file behind which the last token is."""
        return self._read - len(self._text) + self._at

    def token(self) -> tuple[bytes, bytes]:
        """What lies between the last token and the next one, and that one, which is empty at the end of the file."""
        scan = self._at
        while (found := TOKEN.search(self._text, scan)) is None or found[0] == b'"':
            scan = (found.start() if found else len(self._text)) - self._at
            if len(self._text) - self._at > LONGEST:
                raise self._too_long()
            if not self._more(self._at):
                if found:
                    raise self.broken_off()
                before = self._text[self._at :]
                self._to(len(self._text))
                return before, b""
        before = self._text[self._at : found.start()]
        self._to(found.end())
        return before, found[0]

    def element(self, keep: bool = True) -> bytes:
        """The whole object or array whose opening bracket was the last token, or, not to be kept, nothing."""
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
                    self._to(scan)
                    return element
            if not keep:
                self._to(scan)
                start = scan
            if len(self._text) - start > LONGEST:
                raise self._too_long()
            scan -= start
            if not self._more(start):
                raise self.broken_off()
            start = 0

    def wrong(self, what: str) -> UserError:
        return UserError(f"{self.uri}:{self.line + 1}: {what}")

    def broken_off(self) -> UserError:
        return self.wrong("the file breaks off inside its JSON, in what begins or continues here")

    def _too_long(self) -> UserError:
        return self.wrong(f"a value has no end within {LONGEST >> 20} MiB; write the rows as JSON lines")

    def _more(self, keep: int) -> bool:
        """Read on, and forget what is before `keep`, from where offsets then count."""
        more = self._file.read(max(READ, len(self._text) - keep))
        self._text, self._at, self._read = self._text[keep:] + more, self._at - keep, self._read + len(more)
        return bool(more)

    def _to(self, end: int) -> None:
        self.line += self._text.count(b"\n", self._at, end)
        self._at = end


class JsonArray:
    """Block n holds the elements that end in the n-th `lines_bytes` of the file. Going back begins anew."""

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes, self._size = uri, lines_bytes, size_of(uri)
        self._key = _list_of_objects(uri)
        self._open()

    def counts(self) -> None:
        """Not known: only reading it to its end would tell."""

    @property
    def share(self) -> float:
        return self._scanner.position / max(1, self._size)

    def _open(self) -> None:
        self._file = open_bytes(self._uri)
        self._scanner, self._first, self._done = Scanner(self._uri, self._file), True, False
        self._next = self._counted = 0
        opening = _root(self._scanner)
        if opening == b"{":
            for key, value in _fields(self._scanner):
                if value == b"[" and key == self._key:
                    break
                if value in DEPTH:
                    self._scanner.element(keep=False)

    def block(self, number: int) -> Lines | None:
        if number < self._next:
            self.close()
            self._open()
        while True:
            found = self._elements((self._next + 1) * self._lines_bytes)
            if found is None:
                return None
            self._next += 1
            if self._next > number:
                return found

    def _elements(self, end: int) -> Lines | None:
        if self._done:
            return None
        texts, numbers, before = [], [], self._counted
        while self._scanner.position < end and (found := self._element()) is not None:
            texts.append(found[0])
            numbers.append(found[1] - before)
        self._counted = self._scanner.line
        return Lines(texts, numbers, self._counted - before, sum(map(len, texts)))

    def _element(self) -> tuple[bytes, int] | None:
        """The next one, and the lines before it; None behind the last."""
        before, token = self._scanner.token()
        line = self._scanner.line
        if not token:
            raise self._scanner.broken_off()
        if token == b"]" and not before.strip():
            self._done = True
            self._refuse_more()
            return None
        if token not in (b"{", b"[") or before.strip() != (b"" if self._first else b","):
            raise self._scanner.wrong("the array holds something else than objects with a comma between them")
        self._first = False
        return self._scanner.element(), line

    def _refuse_more(self) -> None:
        if self._key is None:
            before, token = self._scanner.token()
            if before.strip() or token:
                raise self._scanner.wrong("there is more behind the end of the array; write the rows as JSON lines")

    def close(self) -> None:
        self._file.close()


def is_lines(uri: str) -> bool:
    """Whether a `.json` file holds one object after the other: JSON lines under another name."""
    with open_bytes(uri) as file:
        scanner = Scanner(uri, file)
        if _root(scanner) == b"[":
            return False
        scanner.element(keep=False)
        return scanner.token()[1] == b"{"


def _list_of_objects(uri: str) -> str | None:
    """The key of an object's only list of objects; None where the file is an array. Raises UserError where there is no such list, or several."""
    with open_bytes(uri) as file:
        scanner = Scanner(uri, file)
        if _root(scanner) == b"[":
            return None
        found = []
        for key, value in _fields(scanner):
            if value == b"[":
                before, first = scanner.token()
                found += [key] if first == b"{" and not before.strip() else []
                if first in (b"{", b"["):
                    scanner.element(keep=False)
                if first == b"]":
                    continue
            if value in DEPTH:
                scanner.element(keep=False)
    if len(found) != 1:
        held = f"lists of objects under {', '.join(found)}" if found else "no list of objects"
        raise UserError(f"{uri} has {held}: a .json file must hold one array of objects, or one object with one such array; write JSON lines")
    return found[0]


def _root(scanner: Scanner) -> bytes:
    """The bracket that the file begins with."""
    before, token = scanner.token()
    if before.removeprefix(BOM).strip() or token not in (b"{", b"["):
        raise scanner.wrong("a .json file must begin with [ or {")
    return token


def _fields(scanner: Scanner) -> Iterator[tuple[str, bytes]]:
    """Key and first token (a whole string, an opening bracket, or nothing for a number or a word) of each field of an object, whose opening bracket
    was the last token. Behind an opening bracket, the caller reads to its end before the next field."""
    before, token = scanner.token()
    while token != b"}":
        if not token.startswith(b'"') or before.strip() not in (b"", b","):
            raise scanner.wrong("not a JSON object") if token else scanner.broken_off()
        key = token[1:-1].decode("utf-8", "replace")
        before, token = scanner.token()
        if not before.lstrip().startswith(b":"):
            raise scanner.wrong("not a JSON object") if token else scanner.broken_off()
        if before.strip() != b":":  # a number or a word; the token is the next key, or the end
            yield key, b""
            before = b","
            continue
        yield key, token
        before, token = scanner.token()
    return
