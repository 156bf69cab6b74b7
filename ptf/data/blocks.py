"""Data files in blocks, each read once for all the lanes of a process.

The one idea: where a block begins follows from the file alone (a row group of parquet; the lines that begin in one `LINES_BYTES` of jsonl), so
lanes that stand at different rows ask for the same blocks, and a place in a file is a block and a row in it. What is held is a few blocks,
however large the files.
"""

import gzip
import json
import posixpath
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ptf import storage
from ptf.errors import UserError

T = TypeVar("T")
Row = dict[str, Any]
FORMATS = (".jsonl", ".jsonl.gz", ".parquet")
LINES_BYTES = 4 << 20
KEEP_BYTES = 64 << 20  # of blocks that some lane may still be in
KEEP_FILES = 4  # open at a time
DEEPEST = 200  # objects and lists inside each other
NESTED = f"more than {DEEPEST} objects and lists inside each other"


def data_files(path: str) -> dict[str, str]:
    """The data files under a path, in the order they are read, and the stamp of each (ptf.storage.stamps)."""
    files = {uri: stamp for uri, stamp in storage.stamps(path).items() if uri.endswith(FORMATS) and not posixpath.basename(uri).startswith(".")}
    if not files:
        raise UserError(f"no {', '.join(FORMATS)} file in {path}")
    return files


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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of parquet, made into Python objects when they are asked for."""

    table: pa.Table
    read: Callable[[pa.Table, int], Row]
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
            return self.read(self.table, i)
        except (pa.ArrowException, ValueError, OverflowError) as e:  # text that is no UTF-8, a date that Python does not have
            raise UserError(f"a value cannot be read: {e}") from None

    def part(self, start: int, end: int) -> "RowGroup":
        return RowGroup(self.table.slice(start, end - start), self.read, self.first + start)


class _Jsonl:
    def __init__(self, uri: str) -> None:
        self._file = storage.open_read(uri, LINES_BYTES + (64 << 10))  # a block is one request, but for a last line that is long
        self._size = self._file.seek(0, 2)

    def block(self, number: int) -> Lines | None:
        start, file = number * LINES_BYTES, self._file
        if start >= self._size:
            return None
        file.seek(max(0, start - 1))
        if start:
            file.readline()  # the end of a line that began in a block before
        room = start + LINES_BYTES - file.tell()
        text = file.read(room) if room > 0 else b""
        if text and not text.endswith(b"\n"):
            text += file.readline()
        return Lines.of(text.split(b"\n")[: -1 if text.endswith(b"\n") else None] if text else [])

    @property
    def share(self) -> float:
        return self._file.tell() / max(1, self._size)

    def close(self) -> None:
        self._file.close()


class _JsonlGz:
    """Blocks of what it decompresses to; going back begins anew."""

    def __init__(self, uri: str) -> None:
        self._uri, self._size = uri, storage.size(uri)
        self._open()

    @property
    def share(self) -> float:
        return self._raw.tell() / max(1, self._size)

    def _open(self) -> None:
        self._raw = storage.open_read(self._uri)
        self._file = gzip.GzipFile(fileobj=self._raw)
        self._next, self._line = 0, 0

    def block(self, number: int) -> Lines | None:
        if number < self._next:
            self.close()
            self._open()
        while True:
            texts = self._lines((self._next + 1) * LINES_BYTES)
            self._next += 1
            if not texts and self._file.tell() < self._next * LINES_BYTES:
                self._next -= 1
                return None
            if self._next > number:
                return Lines.of(texts)

    def _lines(self, end: int) -> list[bytes]:
        texts: list[bytes] = []
        try:
            while self._file.tell() < end and (text := self._file.readline()):
                texts.append(text)
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise UserError(f"{self._uri}: cannot be decompressed after line {self._line + len(texts)}: {e}") from None
        self._line += len(texts)
        return texts

    def close(self) -> None:
        self._file.close()
        self._raw.close()


class _Parquet:
    def __init__(self, uri: str, read: Callable[[pa.Table, int], Row]) -> None:
        self._uri, self._read = uri, read
        self._raw = storage.open_read(uri)
        self._file = self._readable(lambda: pq.ParquetFile(self._raw))
        self.share = 0.0

    def block(self, number: int) -> RowGroup | None:
        if number >= self._file.num_row_groups:
            return None
        self.share = (number + 1) / self._file.num_row_groups
        return RowGroup(self._readable(partial(self._file.read_row_group, number)).combine_chunks(), self._read)

    def _readable(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{self._uri}: not readable as parquet: {e}") from None

    def close(self) -> None:
        self._raw.close()


class Reader:
    """The blocks of some files, by file and number. Blocks of a remote file are fetched one ahead of the newest asked for."""

    def __init__(self, path: str, parquet_row: Callable[[pa.Table, int], Row] = plain_row) -> None:
        self.path, self.uris, self._parquet_row = path, list(data_files(path)), parquet_row
        self.sizes = [storage.size(uri) for uri in self.uris]
        self._remote = not storage.is_local(path)
        self._kept: OrderedDict[tuple[int, int], Block | None] = OrderedDict()  # least recently used first
        self._files: OrderedDict[int, _Jsonl | _JsonlGz | _Parquet] = OrderedDict()
        self._lengths: dict[tuple[int, int], int] = {}  # rows of every block that was asked for, kept or not
        self._reading = threading.Lock()
        self._ahead: dict[tuple[int, int], Future[Block | None]] = {}  # at most one

    def block(self, file: int, number: int) -> Block | None:
        """None behind the last. Raises UserError for a file that cannot be read."""
        key = file, number
        if key not in self._kept:
            block = self._kept[key] = self._fetched(key) if self._remote else self._read(key)
            self._lengths[key] = len(block) if block is not None else 0
            while len(self._kept) > 2 and sum(block.nbytes for block in self._kept.values() if block is not None) > KEEP_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _fetched(self, key: tuple[int, int]) -> Block | None:
        waiting = self._ahead.pop(key, None)
        found = self._read(key) if waiting is None else waiting.result()
        following = (key[0], key[1] + 1) if found is not None else (key[0] + 1, 0)
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

    def _from_file(self, file: int, number: int) -> Block | None:
        if file not in self._files:
            self._files[file] = self._opened(self.uris[file])
            if len(self._files) > KEEP_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(file)
        return self._files[file].block(number)

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

    def _opened(self, uri: str) -> _Jsonl | _JsonlGz | _Parquet:
        if uri.endswith(".parquet"):
            return _Parquet(uri, self._parquet_row)
        return _JsonlGz(uri) if uri.endswith(".gz") else _Jsonl(uri)
