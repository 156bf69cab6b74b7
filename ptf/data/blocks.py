"""Data files in blocks, each read once for all the lanes of a process.

The one idea: where a block begins follows from the file alone (a row group of parquet; the lines that begin in one `LINES_BYTES` of jsonl), so
lanes that stand at different rows ask for the same blocks, and a place in a file is a block and a row in it. What is held is a few blocks,
however large the files.
"""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any, Protocol

import pyarrow as pa

from ptf import storage
from ptf.data import hub
from ptf.data.files import FORMATS, Location, data_files, found_files
from ptf.errors import UserError

__all__ = ["FORMATS", "Block", "DataFile", "Lines", "Location", "Reader", "Row", "RowGroup", "data_files", "found_files", "open_bytes", "plain_row"]

Row = dict[str, Any]
Tables = Callable[[pa.Table], "Block"]
LINES_BYTES = 1 << 20
KEEP_BYTES = 64 << 20  # of blocks that some lane may still be in
KEEP_FILES = 16  # open at a time
DEEPEST = 200  # objects and lists inside each other
NESTED = f"more than {DEEPEST} objects and lists inside each other"


class Block(Protocol):
    """Some rows of a file. It can be sent to another process."""

    @property
    def lines(self) -> int:
        """Of the file that it covers, empty ones too."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def columnar(self) -> bool:
        """Whether its format writes a null for every key of an object that another row has."""
        ...

    def __len__(self) -> int: ...

    def line(self, i: int) -> int:
        """Where row i stands among those lines."""
        ...

    def row(self, i: int) -> Row:
        """Raises UserError for what is no row."""
        ...

    def part(self, start: int, end: int) -> "Block":
        """Rows start to end; `line` counts as before."""
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Lines:
    """Lines of JSON, not parsed before they are asked for."""

    texts: Sequence[bytes]
    numbers: Sequence[int]  # of each among the block's lines
    lines: int
    nbytes: int

    @property
    def columnar(self) -> bool:
        return False

    @staticmethod
    def of(texts: Sequence[bytes]) -> "Lines":
        full = [i for i, text in enumerate(texts) if text.strip()]
        kept = texts if len(full) == len(texts) else [texts[i] for i in full]
        return Lines(kept, range(len(texts)) if len(full) == len(texts) else full, len(texts), sum(map(len, kept)))

    def __len__(self) -> int:
        return len(self.texts)

    def line(self, i: int) -> int:
        return self.numbers[i]

    def row(self, i: int) -> Row:
        try:
            row = json.loads(self.texts[i])
        except ValueError as e:  # of JSON, or of UTF-8
            raise UserError(f"not JSON: {e}") from None
        except RecursionError:
            raise UserError(NESTED) from None
        if not isinstance(row, dict):
            raise UserError(f"a row must be a JSON object, this is a {type(row).__name__}")
        refuse_nested(row, self.texts[i])
        return row

    def part(self, start: int, end: int) -> "Lines":
        return Lines(self.texts[start:end], self.numbers[start:end], self.lines, self.nbytes)


def refuse_nested(row: Row, text: bytes) -> None:
    """Raises UserError for a row of which the parser might run out of stack elsewhere: how much there is differs from thread to thread."""
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return
    level: list[Any] = [row]
    for _ in range(DEEPEST):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v) if isinstance(inner, dict | list)]
        if not level:
            return
    raise UserError(NESTED)


def plain_row(group: pa.Table, i: int) -> Row:
    return group.slice(i, 1).to_pylist()[0]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RowGroup:
    """Rows of parquet, made into Python objects when they are asked for."""

    table: pa.Table
    first: int = 0

    @property
    def lines(self) -> int:
        return self.table.num_rows

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    @property
    def columnar(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.table.num_rows

    def line(self, i: int) -> int:
        return self.first + i

    def row(self, i: int) -> Row:
        try:
            return plain_row(self.table, i)
        except (pa.ArrowException, ValueError, OverflowError) as e:  # text that is no UTF-8, a date that Python does not have
            raise UserError(f"a value cannot be read: {e}") from None

    def part(self, start: int, end: int) -> "RowGroup":
        return RowGroup(self.table.slice(start, end - start), self.first + start)


class DataFile(Protocol):
    """An open file. Its blocks are numbered from 0; a format that is read from the beginning to the end reads over those before."""

    def counts(self) -> list[tuple[int, int]] | None:
        """Rows and lines of every block; None where only reading it to its end from afar, or decompressing it, would tell."""
        ...

    @property
    def share(self) -> float:
        """How much of it is read, between 0 and 1."""
        ...

    def block(self, number: int) -> Block | None: ...

    def close(self) -> None: ...


def open_bytes(uri: str, read_bytes: int = storage.READ_BYTES) -> IO[bytes]:
    """A data file, wherever it is, to read and to seek in."""
    return hub.open_read(uri, read_bytes) if uri.startswith(hub.PREFIX) else storage.open_read(uri, read_bytes)


def size_of(uri: str) -> int:
    """Bytes of a data file, wherever it is."""
    with open_bytes(uri) as file:
        return file.seek(0, 2)


def local_path(uri: str) -> str | None:
    """The path of a file on this machine."""
    return uri.removeprefix("file://") if not uri.startswith(hub.PREFIX) and storage.is_local(uri) else None


class Reader:
    """The blocks of some files, by file and number. Blocks of a remote file are fetched one ahead of the newest asked for."""

    def __init__(self, location: str | Location, of_table: Tables | None = None, columns: list[str] | None = None) -> None:
        """`of_table` makes the block of a row group of parquet; rows as they are by default. Of parquet only some `columns` may be read."""
        found = found_files(location)
        self.path, self.uris, self._of_table = str(location), list(found.stamps), of_table or RowGroup
        self.sizes, self.commit, self.not_read = found.sizes, found.commit, found.not_read
        self._remote = found.commit is not None or not storage.is_local(self.uris[0])
        self._kept: OrderedDict[tuple[int, int], Block | None] = OrderedDict()  # least recently used first
        self._held: weakref.WeakValueDictionary[tuple[int, int], Block] = weakref.WeakValueDictionary()  # by some lane, kept or not
        self._columns = columns
        self._footers: dict[str, Any] = {}  # of parquet files that were opened
        self.reads = 0  # of blocks, from the files
        self._files: OrderedDict[int, DataFile] = OrderedDict()
        self._lengths: dict[tuple[int, int], int] = {}  # rows of every block that was asked for, kept or not
        self._reading = threading.Lock()
        self._ahead: dict[tuple[int, int], Future[Block | None]] = {}  # at most one

    def block(self, file: int, number: int, following: tuple[int, int] | None = None) -> Block | None:
        """None behind the last. `following` is what will be asked for next, by default the next of the files. Raises UserError for a file that
        cannot be read."""
        key = file, number
        if key not in self._kept:
            block = self._held.get(key)
            if block is None:
                block = self._fetched(key, following) if self._remote else self._read(key)
                self.reads += block is not None
                if block is not None:
                    self._held[key] = block
            self._kept[key] = block
            self._lengths[key] = len(block) if block is not None else 0
            while len(self._kept) > 2 and sum(block.nbytes for block in self._kept.values() if block is not None) > KEEP_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _fetched(self, key: tuple[int, int], following: tuple[int, int] | None) -> Block | None:
        waiting = self._ahead.pop(key, None)
        found = self._read(key) if waiting is None else waiting.result()
        following = following or ((key[0], key[1] + 1) if found is not None else (key[0] + 1, 0))
        if following[0] < len(self.uris) and following not in self._kept and following not in self._ahead:
            self._ahead = {following: Future()}  # in a thread that does not keep a process from ending
            threading.Thread(target=self._read_ahead, args=(following, self._ahead[following]), name="ptf-read-ahead", daemon=True).start()
        return found

    def _read_ahead(self, key: tuple[int, int], found: Future[Block | None]) -> None:
        try:
            found.set_result(self._read(key))
        except BaseException as e:  # whatever it is, it belongs to who asks for the block
            found.set_exception(e)

    def _read(self, key: tuple[int, int]) -> Block | None:
        with self._reading:
            return self._from_file(*key)

    def counts(self) -> list[list[tuple[int, int]]] | None:
        """Of every file, the rows and lines of every block; None where some file does not tell without being read from afar or decompressed."""
        found: list[list[tuple[int, int]]] = []
        for file in range(len(self.uris)):
            with self._reading:
                counted = self._file(file).counts()
            if counted is None:
                return None
            found.append(counted)
        return found

    def _from_file(self, file: int, number: int) -> Block | None:
        return self._file(file).block(number)

    def _file(self, file: int) -> DataFile:
        from ptf.data.formats import open_file  # formats are made of this module's blocks

        if file not in self._files:
            self._files[file] = open_file(self.uris[file], LINES_BYTES, self._of_table, self._footers, self._columns)
            if len(self._files) > KEEP_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(file)
        return self._files[file]

    @property
    def rows(self) -> float:
        """In all files, going by those that were read so far."""
        return sum(self._lengths.values()) / max(self.share, 1e-9)

    @property
    def share(self) -> float:
        """How much of all files is read, going by the newest; between 0 and 1."""
        if not self._files:
            return 0.0
        file, newest = next(reversed(self._files.items()))
        return (sum(self.sizes[:file]) + newest.share * self.sizes[file]) / max(1, sum(self.sizes))
