"""Columnar formats: parquet, and Arrow's file format (also feather) and stream format (`datasets.save_to_disk`)."""

from collections.abc import Callable, Iterator
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


class NumberedBlocks:
    """The row groups of a parquet file, or the record batches of Arrow where they are read by their number.

    These are the batches of its file format, or of its stream format on this machine: a local file is mapped into
    memory, so a batch is read from disk when its rows are requested.
    """

    def __init__(
        self, raw: Any, number: int, read: Callable[[int], RowBlock], rows: Callable[[int], int] | None
    ) -> None:
        """Take the open file, the number of its blocks, and what reads a block and its number of rows by its number.

        `rows` is None where it would take a request for each block.
        """
        self._raw, self._number, self._read, self._rows = raw, number, read, rows
        self.share = 0.0

    def block(self, number: int) -> RowBlock | None:
        """Return a block; None after the last."""
        if number >= self._number:
            return None
        self.share = (number + 1) / self._number
        return self._read(number)

    def counts(self) -> list[tuple[int, int]] | None:
        """Return the rows of every block, each of which counts as a line; None where that takes many requests."""
        return [(n, n) for n in map(self._rows, range(self._number))] if self._rows else None

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


def open_parquet(
    uri: str, of_table: Tables, footers: dict[str, pq.FileMetaData], columns: list[str] | None
) -> NumberedBlocks:
    """Open a parquet file, whose footer is taken from `footers` or put there."""
    raw = open_bytes(uri)
    file = readable(uri, "parquet", lambda: pq.ParquetFile(raw, metadata=footers.get(uri)))
    footer = footers[uri] = file.metadata

    def read(number: int) -> RowBlock:
        part = partial(file.read_row_group, number, columns=columns, use_threads=False)
        return of_table(readable(f"{uri}: row group {number}", "parquet", part).combine_chunks())

    return NumberedBlocks(raw, footer.num_row_groups, read, lambda number: footer.row_group(number).num_rows)


class RemoteStream(InOrder):
    """A file of Arrow's stream format in a store. A block is a record batch."""

    def _rows(self) -> Iterator[pa.RecordBatch]:
        return batches(self._uri, self._file)

    def _until(self, end: int) -> RowGroup | None:
        batch = next(self._remaining, None)
        if batch is None:
            self._ended, self._next = True, self._next - 1
            return None
        return RowGroup(pa.Table.from_batches([batch]))


def open_arrow(uri: str) -> NumberedBlocks | RemoteStream:
    """Open a file of Arrow's file format or of its stream format."""
    local = local_path(uri)
    with open_bytes(uri) as file:
        is_stream = file.read(len(FILE)) != FILE
    if is_stream and local is None:
        return RemoteStream(uri, 0)
    raw = pa.memory_map(local) if local else open_bytes(uri)
    if is_stream:
        listed = list(batches(uri, raw))
        number, batch = len(listed), listed.__getitem__
    else:
        opened = readable(uri, "arrow", lambda: pa.ipc.open_file(raw))
        number, batch = opened.num_record_batches, opened.get_batch

    def read(i: int) -> RowGroup:
        return RowGroup(pa.Table.from_batches([readable(f"{uri}: record batch {i}", "arrow", partial(batch, i))]))

    return NumberedBlocks(raw, number, read, (lambda i: len(read(i))) if local else None)


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


def readable(what: str, format_name: str, read: Callable[[], T]) -> T:
    """Return the result of `read`. Raises UserError where the file is truncated or not of its format."""
    try:
        return read()
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{what}: not readable as {format_name}: {e}") from None
