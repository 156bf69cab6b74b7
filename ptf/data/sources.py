"""Rows of a data set: a file, a directory, a glob or a URI. Where they are, one pass over them, and what says which files they were.

Which rows a lane reads, and in which order, is in ptf/data/order.py.
"""

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ptf.data.blocks import Block, Reader, Row, data_files
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where rows are, what they are, and how many of them count."""

    path: str
    weight: float | None = None  # share in a mixture
    kind: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # ptf's name → the name there
    limit: int | None = None  # rows
    epochs: int | None = None  # passes; endless without
    rows: int | None = None  # how many there are, where the files do not tell


class Place:
    """A row that has not been parsed yet, and where it is."""

    __slots__ = ("_before", "_block", "_uri", "epoch", "file", "number", "row")

    def __init__(self, block: Block, row: int, uri: str, before: int, epoch: int = 0, file: int = 0, number: int = 0):
        """Row `row` of a block, `before` lines of whose file come before it; the block is `number` of `file`."""
        self._block, self._uri, self._before = block, uri, before
        self.epoch, self.file, self.number, self.row = epoch, file, number, row

    def read(self) -> Row:
        """Raises UserError for what is no row."""
        return self._block.row(self.row)

    @property
    def where(self) -> str:
        """file:line"""
        return f"{self._uri}:{self._before + self._block.line(self.row) + 1}"


def place(block: Block, i: int, uri: str, before: int) -> Place:
    """Row i of a block, `before` lines of whose file come before it."""
    return Place(block, i, uri, before)


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
