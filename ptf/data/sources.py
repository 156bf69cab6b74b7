"""Rows of a data set: jsonl, jsonl.gz and parquet; a file, a directory, a glob or a URI.

The one idea: the rows of all epochs are one endless list, and row k of it goes to lane k % lanes. So every lane always has rows, each
row is read by one lane, and a place in the list is five numbers.
"""

import gzip
import hashlib
import json
import posixpath
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ptf import storage
from ptf.errors import UserError

T = TypeVar("T")
Row = dict[str, Any]
Place = tuple[Row, str]  # a row, and where it came from: "file:line"
FORMATS = (".jsonl", ".jsonl.gz", ".parquet")


def data_files(path: str) -> list[str]:
    """The data files under a path, in the order they are read."""
    files = [uri for uri in storage.listing(path) if uri.endswith(FORMATS) and not posixpath.basename(uri).startswith(".")]
    if not files:
        raise UserError(f"no {', '.join(FORMATS)} file in {path}")
    return files


def plain_row(group: pa.Table, i: int) -> Row:
    return group.slice(i, 1).to_pylist()[0]


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise UserError(f"{where}: not JSON: {e}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, this is a {type(row).__name__}")
    return row


Pending = tuple[Callable[[], Row], str, int, int]  # reads the row; where it is; byte offset and number of rows or lines behind it


def _jsonl(uri: str, offset: int, line: int) -> Iterator[Pending]:
    with storage.open_read(uri) as raw:
        file = gzip.GzipFile(fileobj=raw) if uri.endswith(".gz") else raw
        file.seek(offset)
        while text := _readline(file, uri, line):
            offset, line = offset + len(text), line + 1
            if text.strip():
                where = f"{uri}:{line}"
                yield partial(_parse, text, where), where, offset, line


def _readline(file: IO[bytes] | gzip.GzipFile, uri: str, line: int) -> bytes:
    try:
        return file.readline()
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise UserError(f"{uri}: cannot be decompressed after line {line}: {e}") from None


def _parquet(uri: str, row: int, read: Callable[[pa.Table, int], Row]) -> Iterator[Pending]:
    with storage.open_read(uri) as raw:
        file = _readable(uri, lambda: pq.ParquetFile(raw))
        first = 0
        for g in range(file.num_row_groups):
            size = file.metadata.row_group(g).num_rows
            if row < first + size:
                group = _readable(uri, partial(file.read_row_group, g)).combine_chunks()
                for i in range(max(0, row - first), size):
                    yield partial(read, group, i), f"{uri}:{first + i + 1}", 0, first + i + 1
            first += size


def _readable(uri: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (pa.ArrowInvalid, OSError) as e:
        raise UserError(f"{uri}: not readable as parquet: {e}") from None


def _rows(uri: str, offset: int = 0, line: int = 0, parquet_row: Callable[[pa.Table, int], Row] = plain_row) -> Iterator[Pending]:
    return _parquet(uri, line, parquet_row) if uri.endswith(".parquet") else _jsonl(uri, offset, line)


def rows_once(path: str, parquet_row: Callable[[pa.Table, int], Row] = plain_row) -> Iterator[Place]:
    """Every row once, in file order."""
    empty = True
    for uri in data_files(path):
        for read, where, _, _ in _rows(uri, parquet_row=parquet_row):
            empty = False
            yield read(), where
    if empty:
        raise UserError(f"no rows in {path}")


class Source:
    """Stream[Place]: one lane's rows, endlessly."""

    def __init__(self, path: str, lane: int = 0, lanes: int = 1, parquet_row: Callable[[pa.Table, int], Row] = plain_row):
        self.path, self._lane, self._lanes, self._parquet_row = path, lane, lanes, parquet_row
        self._files = data_files(path)
        self._identity = hashlib.sha256("\n".join(posixpath.basename(uri) for uri in self._files).encode()).hexdigest()[:16]
        self.epoch = 0  # of the last row
        self.rows: int | None = None  # in an epoch, over all lanes; None until one has passed
        self._file = self._offset = self._line = 0  # behind the last row
        self._dealt = self._epoch_start = 0  # rows passed over or taken, and how many when the epoch began
        self._open: Iterator[Pending] | None = None

    def __next__(self) -> Place:
        while True:
            if self._open is None:
                self._open = _rows(self._files[self._file], self._offset, self._line, self._parquet_row)
            for read, where, offset, line in self._open:
                self._offset, self._line = offset, line
                self._dealt += 1
                if (self._dealt - 1) % self._lanes == self._lane:
                    return read(), where
            self._open, self._offset, self._line = None, 0, 0
            self._file += 1
            if self._file == len(self._files):
                self.rows = self._dealt - self._epoch_start
                if not self.rows:
                    raise UserError(f"no rows in {self.path}")
                self._file, self._epoch_start, self.epoch = 0, self._dealt, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "files": self._identity, "epoch": self.epoch, "file": self._file, "offset": self._offset, "line": self._line,
            "dealt": self._dealt, "epoch_start": self._epoch_start,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["files"] != self._identity:
            raise UserError(f"the data files in {self.path} are not those of the checkpoint: training cannot continue where it stopped")
        self.epoch, self._file, self._offset, self._line = (int(state[key]) for key in ("epoch", "file", "offset", "line"))
        self._dealt, self._epoch_start = int(state["dealt"]), int(state["epoch_start"])
        self._open = None
