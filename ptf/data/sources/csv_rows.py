"""CSV with a header: every value is text, and an empty value is the empty text.

Blocks are read in order, because a quoted value may hold line breaks.
"""

import csv
import json
from collections.abc import Iterator

from ptf.data.sources.in_order import InOrder
from ptf.data.sources.jsonl import NOT_DECOMPRESSED, decompressed
from ptf.errors import UserError


class Csv(InOrder):
    """A CSV file, plain or compressed (`.gz`, `.zst`), whose rows are converted to JSON."""

    def _open(self) -> None:
        super()._open()
        # This holds for the whole process; the default of 131,072 refuses long documents.
        csv.field_size_limit(1 << 30)  # characters of a value
        self._reader = csv.reader(self._texts(), strict=True)
        self._header = self._row() or []
        if len(set(self._header)) < len(self._header) or not all(self._header):
            raise UserError(
                f"{self._uri}:1: the header must name every column, each by a different name; it is {self._header[:8]}"
            )

    def _texts(self) -> Iterator[str]:
        """Yield the file's lines as text, and count bytes and lines."""
        file = decompressed(self._file, self._uri)
        while text := file.readline():
            self._at, self._line = self._at + len(text), self._line + 1
            yield text.decode("utf-8-sig" if self._line == 1 else "utf-8")

    def _row(self) -> list[str] | None:
        """Return the next row; None at the end. Raises UserError where it is not CSV."""
        first = self._line + 1
        try:
            return next(self._reader, None)
        except (csv.Error, UnicodeDecodeError, *NOT_DECOMPRESSED) as error:
            raise UserError(f"{self._uri}:{first}: not readable as CSV of UTF-8: {error}") from None

    def _rows(self) -> Iterator[tuple[bytes, int]]:
        line = self._line
        while (row := self._row()) is not None:
            if row and len(row) != len(self._header):
                raise UserError(
                    f"{self._uri}:{line + 1}: a row of {len(row)} values under a header of {len(self._header)} columns"
                )
            text = json.dumps(dict(zip(self._header, row, strict=True)), ensure_ascii=False).encode() if row else b""
            yield text, line
            line = self._line
