"""Rows of a data set: jsonl, jsonl.gz and parquet; a file, a directory, a glob or a URI.

The one idea: the rows of all epochs are one list, and row k of it goes to lane k % lanes. So every lane always has rows, each row is trained by
one lane, and a place in the list is a few numbers.
"""

import hashlib
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptf.data.blocks import Block, Reader, Row, data_files
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where rows are, what they are, and how many of them count."""

    path: str
    weight: float = 1.0
    kind: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # ptf's name → the name there
    limit: int | None = None  # rows
    epochs: int | None = None  # passes; endless without
    verify_up_to: float = float("inf")  # bytes of a tokenized source that are hashed before it is read


@dataclass(frozen=True, slots=True)
class Place:
    """A row that has not been parsed yet, and where it is."""

    read: Callable[[], Row]  # raises UserError for what is no row
    where: str  # "file:line"


def place(block: Block, i: int, uri: str, before: int) -> Place:
    """Row i of a block, `before` lines of whose file come before it."""
    return Place(lambda: block.row(i), f"{uri}:{before + block.line(i) + 1}")


def rows_once(reader: Reader, limit: int | None = None) -> Iterator[Place]:
    """Every row once, in file order; the first `limit` where there is one."""
    count = 0
    for block, uri, before in blocks_once(reader):
        for i in range(len(block) if limit is None else min(len(block), limit - count)):
            yield place(block, i, uri, before)
        count += len(block)
        if limit is not None and count >= limit:
            return


def blocks_once(reader: Reader) -> Iterator[tuple[Block, str, int]]:
    """Every block once, in file order, with its file and the lines before it there. Raises UserError where no block has a row."""
    empty = True
    for file, uri in enumerate(reader.uris):
        number = before = 0
        while (block := reader.block(file, number)) is not None:
            empty = empty and not len(block)
            yield block, uri, before
            number, before = number + 1, before + block.lines
    if empty:
        raise UserError(f"no rows in {reader.path}")


def fingerprint(reader: Reader) -> str:
    """Of the files' names and sizes, wherever they lie."""
    names = "\n".join(f"{posixpath.basename(uri)} {size}" for uri, size in zip(reader.uris, reader.sizes, strict=True))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def fingerprints(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """By name."""
    return {name: fingerprint(Reader(spec.path)) for name, spec in sources.items()}


def stamps(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """By name: of the files' names, sizes and times or entity tags, so that what was written over is another, too."""
    digests = {}
    for name, spec in sources.items():
        files = data_files(spec.path)
        above = len(posixpath.dirname(posixpath.commonprefix(list(files))))  # wherever they lie, and below that every file by its whole name
        digests[name] = hashlib.sha256(json.dumps([(uri[above:], stamp) for uri, stamp in files.items()]).encode()).hexdigest()[:16]
    return digests


class Source:
    """Stream[Place]: one lane's rows, endlessly; in each pass the first `limit` rows where there is one."""

    def __init__(self, reader: Reader, lane: int = 0, lanes: int = 1, limit: int | None = None):
        """`reader` may be shared by the lanes of a thread."""
        self.path, self._reader, self._lane, self._lanes, self._limit = reader.path, reader, lane, lanes, limit
        self._fingerprint = fingerprint(reader)
        self.epoch = 0  # of the last row
        self.rows: int | None = None  # in an epoch, over all lanes; None until one has passed
        self._file = self._block = self._index = 0  # behind the last row
        self._line = 0  # lines of the file before the block
        self._dealt = self._epoch_start = 0  # rows passed over or taken, and how many when the epoch began

    def __next__(self) -> Place:
        while True:
            block = self._reader.block(self._file, self._block)
            if block is None:
                self._file, self._block, self._line = self._file + 1, 0, 0
                if self._file == len(self._reader.uris):
                    self._end_epoch()
                continue
            left = len(block) - self._index
            if self._limit is not None:
                left = min(left, self._limit - (self._dealt - self._epoch_start))
            ahead = (self._lane - self._dealt) % self._lanes
            if ahead < left:
                i = self._index + ahead
                self._index, self._dealt = i + 1, self._dealt + ahead + 1
                return place(block, i, self._reader.uris[self._file], self._line)
            self._dealt += left
            if self._limit is not None and self._dealt - self._epoch_start >= self._limit:
                self._end_epoch()
            else:
                self._block, self._index, self._line = self._block + 1, 0, self._line + block.lines

    def _end_epoch(self) -> None:
        self.rows = self._dealt - self._epoch_start
        if not self.rows:
            raise UserError(f"no rows in {self.path}")
        self._file = self._block = self._index = self._line = 0
        self._epoch_start, self.epoch = self._dealt, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "files": self._fingerprint, "epoch": self.epoch, "file": self._file, "block": self._block, "index": self._index, "line": self._line,
            "dealt": self._dealt, "epoch_start": self._epoch_start,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["files"] != self._fingerprint:
            raise UserError(f"the data files in {self.path} are not those of the checkpoint (names or sizes): training cannot continue where it stopped")
        self.epoch, self._file, self._block, self._index, self._line = (int(state[key]) for key in ("epoch", "file", "block", "index", "line"))
        self._dealt, self._epoch_start = int(state["dealt"]), int(state["epoch_start"])
