"""CSV with a header: every value is text, an empty one the empty text. Blocks come one after the other, for a quoted value may hold line breaks."""

import csv
import json
from collections.abc import Iterator

from ptf.data.blocks import Lines, open_bytes, size_of
from ptf.errors import UserError

LONGEST = 1 << 30  # characters of one value


class Csv:
    """Block n holds the rows that begin in the n-th `lines_bytes` of the file; rows are handed on as JSON. Going back begins anew."""

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes, self._size = uri, lines_bytes, size_of(uri)
        csv.field_size_limit(LONGEST)  # for all readers of the process; the default of 131,072 refuses long documents
        self._open()

    def counts(self) -> None:
        """Not known: only reading it to its end would tell."""

    @property
    def share(self) -> float:
        return self._at / max(1, self._size)

    def _open(self) -> None:
        self._file = open_bytes(self._uri)
        self._next = self._at = self._line = self._counted = 0  # `_counted`: lines of the blocks so far
        self._rows = csv.reader(self._texts(), strict=True)
        self._header = self._row() or []
        if len(set(self._header)) < len(self._header) or not all(self._header):
            raise UserError(f"{self._uri}:1: the header must name every column, each by another name; it is {self._header[:8]}")

    def _texts(self) -> Iterator[str]:
        while text := self._file.readline():
            self._at, self._line = self._at + len(text), self._line + 1
            yield text.decode("utf-8-sig" if self._line == 1 else "utf-8")

    def _row(self) -> list[str] | None:
        first = self._line + 1
        try:
            return next(self._rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self._uri}:{first}: not readable as CSV of UTF-8: {error}") from None

    def block(self, number: int) -> Lines | None:
        if number < self._next:
            self.close()
            self._open()
        while True:
            found = self._lines((self._next + 1) * self._lines_bytes)
            if found is None:
                return None
            self._next += 1
            if self._next > number:
                return found

    def _lines(self, end: int) -> Lines | None:
        texts, numbers, before = [], [], self._counted
        while self._at < end:
            first = self._line
            row = self._row()
            if row is None:
                break
            if not row:  # an empty line
                continue
            if len(row) != len(self._header):
                raise UserError(f"{self._uri}:{first + 1}: a row of {len(row)} values under a header of {len(self._header)} columns")
            texts.append(json.dumps(dict(zip(self._header, row, strict=True)), ensure_ascii=False).encode())
            numbers.append(first - before)
        if not texts and self._at < end:
            return None
        self._counted = self._line
        return Lines(texts, numbers, self._line - before, sum(map(len, texts)))

    def close(self) -> None:
        self._file.close()
