"""Data files that can only be read from their beginning: compressed lines, CSV, arrays of JSON, streams in a store."""

from collections.abc import Iterator
from typing import Any

from ptf.data.sources.blocks import Lines, RowBlock, open_bytes


class InOrder:
    """A file of text. Block n holds the rows that begin in the n-th `lines_bytes` of the text.

    An earlier block starts again from the beginning. A format says in `_rows` what a row is.
    """

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes = uri, lines_bytes
        self._open()

    def _open(self) -> None:
        self._file = open_bytes(self._uri)
        self._size = self._file.seek(0, 2)
        self._file.seek(0)
        self._at = self._line = 0  # bytes and lines of the text that were taken
        self._next = self._lines_before = 0  # the next block, and the lines of the blocks before it
        self._ended, self._remaining = False, self._rows()

    def _rows(self) -> Iterator[Any]:
        """Yield each row as JSON and the lines before it, and count `_at` and `_line`; an empty text is no row."""
        raise NotImplementedError

    def counts(self) -> None:
        """Return None: counting the rows would take reading the whole file."""

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._file.tell() / max(1, self._size)

    def block(self, number: int) -> RowBlock | None:
        """Return a block of rows; None after the last."""
        if number < self._next:
            self.close()
            self._open()
        while not self._ended:
            self._next += 1  # before the reading, so that one that failed starts again
            block = self._until(self._next * self._lines_bytes)
            if self._next > number:
                return block
        return None

    def _until(self, end: int) -> RowBlock | None:
        """Return the rows that begin before byte `end`."""
        texts, numbers, before = list[bytes](), list[int](), self._lines_before
        while self._at < end and not self._ended:
            text, line = next(self._remaining, (None, 0))
            self._ended = text is None
            if text:
                texts.append(text)
                numbers.append(line - before)
        self._lines_before = self._line
        return Lines(texts, numbers, self._line - before, sum(map(len, texts)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
