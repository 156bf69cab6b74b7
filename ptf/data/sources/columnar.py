"""Columnar formats: parquet, and Arrow's file format (also feather) and stream format (`datasets.save_to_disk`)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ptf.data.sources.blocks import Block, RowGroup, Tables, local_path, open_bytes, size_of
from ptf.errors import UserError

T = TypeVar("T")
END = b"\xff\xff\xff\xff\0\0\0\0"  # marks the end of a stream


class Parquet:
    """A parquet file. A block is a row group."""

    def __init__(
        self, uri: str, of_table: Tables, footers: dict[str, pq.FileMetaData], columns: list[str] | None = None
    ) -> None:
        self._uri, self._of_table, self._columns = uri, of_table, columns
        self._raw = open_bytes(uri)
        self._file = readable(uri, "parquet", lambda: pq.ParquetFile(self._raw, metadata=footers.get(uri)))
        self._footer = footers[uri] = self._file.metadata
        self.share = 0.0

    def block(self, number: int) -> Block | None:
        """Return a row group; None after the last."""
        if number >= self._footer.num_row_groups:
            return None
        self.share = (number + 1) / self._footer.num_row_groups
        table = readable(
            f"{self._uri}: row group {number}",
            "parquet",
            partial(self._file.read_row_group, number, columns=self._columns, use_threads=False),
        )
        return self._of_table(table.combine_chunks())

    def counts(self) -> list[tuple[int, int]]:
        """Return the rows of every row group, from the footer."""
        return row_and_line_counts(
            self._footer.row_group(number).num_rows for number in range(self._footer.num_row_groups)
        )

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class ArrowFile:
    """A file of Arrow's file format. A block is a record batch."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._raw = pa.memory_map(local) if (local := local_path(uri)) else open_bytes(uri)
        self._file = readable(uri, "arrow", lambda: pa.ipc.open_file(self._raw))
        self._local, self._blocks = local is not None, self._file.num_record_batches
        self.share = 0.0

    def counts(self) -> list[tuple[int, int]] | None:
        """Return the rows of every batch of a local file; None for a remote one.

        Each batch holds its own row count: a local file is mapped into memory, a remote one would take a request for
        each batch.
        """
        return (
            row_and_line_counts(self._batch(number).num_rows for number in range(self._blocks)) if self._local else None
        )

    def block(self, number: int) -> RowGroup | None:
        """Return a record batch; None after the last."""
        if number >= self._blocks:
            return None
        self.share = (number + 1) / self._blocks
        return RowGroup(pa.Table.from_batches([self._batch(number)]))

    def _batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch. Raises UserError where it cannot be read."""
        return readable(f"{self._uri}: record batch {number}", "arrow", partial(self._file.get_batch, number))

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class ArrowStream:
    """A file of Arrow's stream format. A block is a record batch.

    A local file is mapped into memory: its batches are listed when it is opened, and read from disk when their rows are
    requested. A remote file is read in order; an earlier block starts again from the beginning.
    """

    def __init__(self, uri: str) -> None:
        self._uri, self._size, local = uri, size_of(uri), local_path(uri)
        self._batches: list[pa.RecordBatch] | None = None
        self._raw: Any = pa.memory_map(local) if local else None
        self.share = 0.0
        if local is None:
            self._open()
            return
        self._stream, self._batches = readable(uri, "arrow", lambda: pa.ipc.open_stream(self._raw)), []
        while (batch := self._next_batch()) is not None:
            self._batches.append(batch)

    def counts(self) -> list[tuple[int, int]] | None:
        """Return the rows of every batch of a local file; None for a remote one."""
        return None if self._batches is None else row_and_line_counts(batch.num_rows for batch in self._batches)

    def _open(self) -> None:
        self._raw = open_bytes(self._uri)
        self._stream, self._number = readable(self._uri, "arrow", lambda: pa.ipc.open_stream(self._raw)), 0

    def _next_batch(self) -> pa.RecordBatch | None:
        """Return the next record batch; None after the last. Raises UserError for a truncated file."""
        number = len(self._batches) if self._batches is not None else self._number
        try:
            return readable(f"{self._uri}: record batch {number}", "arrow", self._stream.read_next_batch)
        except StopIteration:
            if not self._ended():
                raise UserError(
                    f"{self._uri}: breaks off after record batch {number}: its end mark is missing"
                ) from None
            return None

    def _ended(self) -> bool:
        """Return whether the file ends with the format's end mark."""
        with open_bytes(self._uri) as file:
            file.seek(max(0, self._size - len(END)))
            return file.read(len(END)) == END

    def block(self, number: int) -> RowGroup | None:
        """Return a record batch; None after the last."""
        if self._batches is not None:
            if number >= len(self._batches):
                return None
            self.share = (number + 1) / len(self._batches)
            return RowGroup(pa.Table.from_batches([self._batches[number]]))
        if number < self._number:
            self.close()
            self._open()
        while (batch := self._next_batch()) is not None:
            self._number += 1
            if self._number > number:
                self.share = self._raw.tell() / max(1, self._size)
                return RowGroup(pa.Table.from_batches([batch]))
        return None

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


def row_and_line_counts(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Return the rows and lines of blocks in which every row counts as a line."""
    return [(n, n) for n in rows]


def readable(what: str, format_name: str, read: Callable[[], T]) -> T:
    """Return the result of `read`. Raises UserError where the file is truncated or not of its format."""
    try:
        return read()
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{what}: not readable as {format_name}: {e}") from None
