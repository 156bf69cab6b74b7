"""Blocks: some rows of a data file, as each format gives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, Protocol

import pyarrow as pa

from ptf import storage
from ptf.data.sources import hub
from ptf.data.sources.json_values import is_plain, json_value, parsed
from ptf.errors import UserError

Row = dict[str, Any]
Tables = Callable[[pa.Table], "RowBlock"]


class RowBlock(Protocol):
    """Some rows of a file, which can be sent to another process."""

    columnar: ClassVar[bool]  # whether the format writes a null for every key of an object that another row has

    @property
    def lines(self) -> int:
        """Return the number of lines of the file that the block covers, empty ones included."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the size of the block in memory, in bytes."""
        ...

    def __len__(self) -> int: ...

    def line(self, i: int) -> int:
        """Return the line of row i among the block's lines."""
        ...

    def row(self, i: int) -> Row:
        """Return row i. Raises UserError where it cannot be parsed."""
        ...

    def part(self, start: int, end: int) -> "RowBlock":
        """Return the rows from `start` to before `end`; `line` counts as before."""
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Lines:
    """Lines of JSON, parsed when a row is requested."""

    columnar: ClassVar[bool] = False  # JSON has no key that its text does not have
    texts: Sequence[bytes]
    numbers: Sequence[int]  # the number of each text among the block's lines
    lines: int
    nbytes: int

    def __len__(self) -> int:
        return len(self.texts)

    def line(self, i: int) -> int:
        """Return the line of row i among the block's lines."""
        return self.numbers[i]

    def row(self, i: int) -> Row:
        """Return row i. Raises UserError where it is not a JSON object."""
        row = parsed(self.texts[i])
        if not isinstance(row, dict):
            raise UserError(f"a row must be a JSON object, this is a {type(row).__name__}")
        return row

    def part(self, start: int, end: int) -> "Lines":
        """Return the rows from `start` to before `end`."""
        return Lines(self.texts[start:end], self.numbers[start:end], self.lines, self.nbytes)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RowGroup:
    """Rows of parquet or Arrow, converted to values of JSON when a row is requested."""

    columnar: ClassVar[bool] = True  # a table has every column in every row
    table: pa.Table
    first: int = 0
    _converted: list[pa.Field] = field(init=False, repr=False)  # columns of types that JSON does not have

    def __post_init__(self) -> None:
        object.__setattr__(self, "_converted", [column for column in self.table.schema if not is_plain(column.type)])

    @property
    def lines(self) -> int:
        """Return the number of rows, each of which counts as a line."""
        return self.table.num_rows

    @property
    def nbytes(self) -> int:
        """Return the size of the table in memory, in bytes."""
        return self.table.nbytes

    def __len__(self) -> int:
        return self.table.num_rows

    def line(self, i: int) -> int:
        """Return the number of row i in the row group."""
        return self.first + i

    def row(self, i: int) -> Row:
        """Return row i. Raises UserError where a value cannot be converted."""
        try:
            row = self.table.slice(i, 1).to_pylist()[0]
            return row | {column.name: json_value(row[column.name], column.type) for column in self._converted}
        except (pa.ArrowException, ValueError, OverflowError) as e:
            # Text that is not UTF-8, or a date that Python cannot represent.
            raise UserError(f"a value cannot be read: {e}") from None

    def part(self, start: int, end: int) -> "RowGroup":
        """Return the rows from `start` to before `end`."""
        return RowGroup(self.table.slice(start, end - start), self.first + start)


def open_bytes(uri: str, read_bytes: int = storage.READ_BYTES) -> IO[bytes]:
    """Open a data file, local or remote, to read and to seek in."""
    return hub.open_read(uri, read_bytes) if uri.startswith(hub.PREFIX) else storage.open_read(uri, read_bytes)


def local_path(uri: str) -> str | None:
    """Return the path of a file on this machine, or None for a remote file."""
    return uri.removeprefix("file://") if not uri.startswith(hub.PREFIX) and storage.is_local(uri) else None
