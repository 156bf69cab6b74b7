"""CSV with a header: every value is text, and an empty value is the empty text.

Blocks are read in order, because a quoted value may hold line breaks.
"""

import csv
import json
from collections.abc import Iterator

from ptf.data.sources.blocks import Lines, open_bytes, size_of
from ptf.errors import UserError

MAX_VALUE_CHARACTERS = 1 << 30


class Csv:
    """A CSV file. Block n holds the rows that begin in the n-th `lines_bytes` of the file, converted to JSON.

    An earlier block starts again from the beginning.
    """

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes, self._size = uri, lines_bytes, size_of(uri)
        # This holds for the whole process; the default of 131,072 refuses long documents.
        csv.field_size_limit(MAX_VALUE_CHARACTERS)
        self._open()

    def counts(self) -> None:
        """Return None: counting the rows would take reading the whole file."""

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._at / max(1, self._size)

    def _open(self) -> None:
        """Open the file at its beginning and read the header."""
        self._file = open_bytes(self._uri)
        self._next = self._at = self._line = self._lines_before = 0  # lines of the blocks so far
        self._rows = csv.reader(self._texts(), strict=True)
        self._header = self._row() or []
        if len(set(self._header)) < len(self._header) or not all(self._header):
            raise UserError(
                f"{self._uri}:1: the header must name every column, each by a different name; it is {self._header[:8]}"
            )

    def _texts(self) -> Iterator[str]:
        """Yield the file's lines as text, and count bytes and lines."""
        while text := self._file.readline():
            self._at, self._line = self._at + len(text), self._line + 1
            yield text.decode("utf-8-sig" if self._line == 1 else "utf-8")

    def _row(self) -> list[str] | None:
        """Return the next row; None at the end. Raises UserError where it is not CSV."""
        first = self._line + 1
        try:
            return next(self._rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self._uri}:{first}: not readable as CSV of UTF-8: {error}") from None

    def block(self, number: int) -> Lines | None:
        """Return a block of rows; None after the last."""
        if number < self._next:
            self.close()
            self._open()
        while True:
            lines = self._lines((self._next + 1) * self._lines_bytes)
            if lines is None:
                return None
            self._next += 1
            if self._next > number:
                return lines

    def _lines(self, end: int) -> Lines | None:
        """Return the rows that begin before byte `end`; None where the file has ended."""
        texts, numbers, start = [], [], self._lines_before
        while self._at < end:
            first = self._line
            row = self._row()
            if row is None:
                break
            if not row:  # an empty line
                continue
            if len(row) != len(self._header):
                raise UserError(
                    f"{self._uri}:{first + 1}: a row of {len(row)} values under a header of {len(self._header)} columns"
                )
            texts.append(json.dumps(dict(zip(self._header, row, strict=True)), ensure_ascii=False).encode())
            numbers.append(first - start)
        if not texts and self._at < end:
            return None
        self._lines_before = self._line
        return Lines(texts, numbers, self._line - start, sum(map(len, texts)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
