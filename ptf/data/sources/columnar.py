"""Columnar formats: parquet, and Arrow's file format (also feather) and stream format (`datasets.save_to_disk`)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ptf.data.sources.blocks import RowBlock, RowGroup, Tables, local_path, open_bytes
from ptf.data.sources.in_order import InOrder
from ptf.errors import UserError

T = TypeVar("T")
FILE = b"ARROW1"  # the first bytes of the file format; the stream format, of `save_to_disk`, has no such mark
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

    def block(self, number: int) -> RowBlock | None:
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


class RecordBatches:
    """Record batches of Arrow that are read by their number, of which each is a block.

    They are those of its file format, or of its stream format on this machine: a local file is mapped into memory, so a
    batch is read from disk when its rows are requested.
    """

    def __init__(self, uri: str, raw: Any, batch: Callable[[int], pa.RecordBatch], number: int) -> None:
        self._uri, self._raw, self._of_number, self._number = uri, raw, batch, number
        self.share = 0.0

    def counts(self) -> list[tuple[int, int]] | None:
        """Return the rows of every batch of a local file; None for a remote one.

        Each batch holds its own row count: a remote file would take a request for each batch.
        """
        if local_path(self._uri) is None:
            return None
        return row_and_line_counts(self._batch(number).num_rows for number in range(self._number))

    def block(self, number: int) -> RowGroup | None:
        """Return a record batch; None after the last."""
        if number >= self._number:
            return None
        self.share = (number + 1) / self._number
        return RowGroup(pa.Table.from_batches([self._batch(number)]))

    def _batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch. Raises UserError where it cannot be read."""
        return readable(f"{self._uri}: record batch {number}", "arrow", partial(self._of_number, number))

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class RemoteStream(InOrder):
    """A file of Arrow's stream format in a store. A block is a record batch."""

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches."""
        return batches(self._uri, self._file)

    def _until(self, end: int) -> RowGroup | None:
        """Return the next record batch; None after the last."""
        batch = next(self._remaining, None)
        if batch is None:
            self._ended, self._next = True, self._next - 1
            return None
        return RowGroup(pa.Table.from_batches([batch]))


def open_arrow(uri: str) -> RecordBatches | RemoteStream:
    """Open a file of Arrow's file format or of its stream format."""
    local = local_path(uri)
    with open_bytes(uri) as file:
        is_stream = file.read(len(FILE)) != FILE
    if is_stream and local is None:
        return RemoteStream(uri, 0)
    raw = pa.memory_map(local) if local else open_bytes(uri)
    if is_stream:
        listed = list(batches(uri, raw))
        return RecordBatches(uri, raw, listed.__getitem__, len(listed))
    opened = readable(uri, "arrow", lambda: pa.ipc.open_file(raw))
    return RecordBatches(uri, raw, opened.get_batch, opened.num_record_batches)


def batches(uri: str, raw: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream. Raises UserError for a truncated file."""
    stream = readable(uri, "arrow", lambda: pa.ipc.open_stream(raw))
    for number in count():
        try:
            batch = readable(f"{uri}: record batch {number}", "arrow", stream.read_next_batch)
        except StopIteration:
            with open_bytes(uri) as file:
                file.seek(max(0, file.seek(0, 2) - len(END)))
                if file.read(len(END)) != END:
                    raise UserError(f"{uri}: breaks off after record batch {number}: its end mark is missing") from None
            return
        yield batch


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
