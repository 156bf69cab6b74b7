"""Rows of a data set, of the files that ptf.data.files chooses: one pass over them, and what says which files they were.

Which rows a lane reads, and in which order, is in ptf/data/order.py.
"""

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ptf.data.blocks import Block, Location, Reader, Row, data_files, found_files
from ptf.data.files import described
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where rows are, what they are, and how many of them count."""

    path: str
    weight: float | None = None  # share in a mixture
    kind: str = "auto"
    columns: Mapping[str, str | None] = field(default_factory=dict)  # ptf's name → the name there; None: that column is not used
    limit: int | None = None  # rows
    epochs: int | None = None  # passes; endless without
    rows: int | None = None  # how many there are, where the files do not tell
    config: str | None = None  # of a dataset with several
    split: str | None = None
    revision: str | None = None  # of a dataset of the Hub
    verify_up_to: float = float("inf")  # bytes of a tokenized source that are hashed before it is read


class Place:
    """A row that has not been parsed yet, and where it is."""

    __slots__ = ("_before", "_uri", "block", "epoch", "file", "number", "row")

    def __init__(self, block: Block, row: int, uri: str, before: int, epoch: int = 0, file: int = 0, number: int = 0):
        """Row `row` of a block, `before` lines of whose file come before it; the block is `number` of `file`."""
        self.block, self._uri, self._before = block, uri, before
        self.epoch, self.file, self.number, self.row = epoch, file, number, row

    def read(self) -> Row:
        """Raises UserError for what is no row."""
        return self.block.row(self.row)

    @property
    def columnar(self) -> bool:
        """As of its block."""
        return self.block.columnar

    @property
    def where(self) -> str:
        """file:line"""
        return f"{self._uri}:{self._before + self.block.line(self.row) + 1}"


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
    """Of the files' names and sizes, wherever they lie; of files of the Hub, with their commit."""
    names = "\n".join(f"{posixpath.basename(uri)} {size}" for uri, size in zip(reader.uris, reader.sizes, strict=True))
    return hashlib.sha256(names.encode()).hexdigest()[:16] + (f"@{reader.commit}" if reader.commit else "")


def refuse_other_files(reader: Reader, held: str) -> None:
    """Raises UserError where a checkpoint, whose fingerprint of a source is `held`, was made with other files than the reader's."""
    if held == fingerprint(reader):
        return
    commit = held.partition("@")[2]
    if commit and commit != reader.commit:
        raise UserError(f"{reader.path} is at commit {reader.commit}, the checkpoint's data were of commit {commit}: set the source's `revision: {commit}`")
    raise UserError(f"the data files in {reader.path} are not those of the checkpoint (names or sizes): training cannot continue where it stopped")


def first_lines(sources: Mapping[str, SourceSpec]) -> list[str]:
    """What is read of each source and what lies beside it and is not: the first lines of a run."""
    return [line for name, spec in sources.items() for line in described(name, Location.of(spec), found_files(Location.of(spec)))]


def fingerprints(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """By name."""
    return {name: fingerprint(Reader(Location.of(spec))) for name, spec in sources.items()}


def stamps(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """By name: of the files' names, sizes and times or entity tags, so that what was written over is another, too."""
    digests = {}
    for name, spec in sources.items():
        files = data_files(Location.of(spec))
        above = len(posixpath.dirname(posixpath.commonprefix(list(files))))  # wherever they lie, and below that every file by its whole name
        digests[name] = hashlib.sha256(json.dumps([(uri[above:], stamp) for uri, stamp in files.items()]).encode()).hexdigest()[:16]
    return digests
