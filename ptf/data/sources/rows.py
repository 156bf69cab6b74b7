"""Rows of a data set, from the files that ptf.data.sources.files chooses: one pass over them, and their fingerprints.

Which rows a data partition reads, and in which order, is decided in ptf/data/order.py.
"""

import hashlib
import json
import posixpath
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptf.data.sources.blocks import Row, RowBlock
from ptf.data.sources.files import described, resolve_files
from ptf.data.sources.reader import Reader
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where rows are, what they are, and how many of them are read."""

    path: str  # may end with a config and a split (ptf.data.sources.hub.without_names)
    sampling_weight: float | None = None  # share in a mixture
    kind: str = "auto"
    # ptf's name → the name in the data; None: that column is not used.
    columns: Mapping[str, str | None] = field(default_factory=dict)
    limit: int | None = None  # rows
    epochs: int | None = None  # passes over the rows; None: endless
    rows: int | None = None  # number of rows, where the files do not tell
    verify_up_to: float = float("inf")  # bytes of a tokenized source that are hashed before it is read


def specs(sources: Any, epochs: int | None = None, verify_up_to: float = float("inf")) -> dict[str, SourceSpec]:
    """Return the config's sources as plain values; `epochs` applies to those that have none of their own."""
    return {
        name: SourceSpec(
            s.path,
            s.sampling_weight,
            s.kind,
            s.columns,
            s.limit,
            s.epochs or epochs,
            s.row_count,
            verify_up_to=verify_up_to,
        )
        for name, s in sources.items()
    }


@dataclass(eq=False, slots=True)
class RawRow:
    """A row that has not been parsed yet, and its location."""

    rows: RowBlock  # of its block, or a part of them
    row: int  # its number in the block
    uri: str
    before: int  # lines of the file before the block
    epoch: int = 0
    file: int = 0
    block: int = 0  # its number in the file
    first: int = 0  # the number in the block of the first of `rows`

    def read(self) -> Row:
        """Return the parsed row. Raises UserError where it cannot be parsed."""
        return self.rows.row(self.row - self.first)

    @property
    def where(self) -> str:
        """Return the location of the row as file:line."""
        return f"{self.uri}:{self.before + self.rows.line(self.row - self.first) + 1}"


class ReadBlock(NamedTuple):
    """A block as a pass over a source reads it, and how many of its rows count: the first ones."""

    rows: RowBlock
    file: int
    block: int  # its number in the file
    before: int  # lines of the file before the block
    counted: int


def rows_once(reader: Reader, limit: int | None = None) -> Iterator[RawRow]:
    """Yield every row once, in file order; with `limit`, only the first rows."""
    for rows, file, block, before, counted in blocks_once(reader, limit):
        for i in range(counted):
            yield RawRow(rows, i, reader.uris[file], before, 0, file, block)


def blocks_once(reader: Reader, limit: int | None = None) -> Iterator[ReadBlock]:
    """Yield every block once, in file order; with `limit`, only those of the first rows.

    Raises UserError where no block has a row.
    """
    empty, left = True, sys.maxsize if limit is None else limit
    for file in range(len(reader.uris)):
        block = before = 0
        while left and (rows := reader.block(file, block)) is not None:
            counted = min(len(rows), left)
            empty, left = empty and not counted, left - counted
            yield ReadBlock(rows, file, block, before, counted)
            block, before = block + 1, before + rows.lines
    if empty:
        raise UserError(f"no rows in {reader.path}")


def fingerprint(reader: Reader) -> str:
    """Return a hash of the files' names and sizes, wherever they are; for files of the Hub, with their commit."""
    names = "\n".join(f"{posixpath.basename(uri)} {size}" for uri, size in zip(reader.uris, reader.sizes, strict=True))
    return hashlib.sha256(names.encode()).hexdigest()[:16] + (f"@{reader.commit}" if reader.commit else "")


def raise_if_other_files(reader: Reader, stored: str) -> None:
    """Raise UserError unless the checkpoint was made with the reader's files.

    `stored` is the fingerprint of the source in the checkpoint.
    """
    if stored == fingerprint(reader):
        return
    commit = stored.partition("@")[2]
    if commit and commit != reader.commit:
        raise UserError(
            f"{reader.path} is at commit {reader.commit}, the checkpoint's data were of commit {commit}: "
            f"write @{commit} behind the dataset's name in the source's path"
        )
    raise UserError(
        f"the data files in {reader.path} are not those of the checkpoint (names or sizes): "
        "training cannot continue where it stopped"
    )


def first_lines(sources: Mapping[str, SourceSpec]) -> list[str]:
    """Return what is read of each source and what is not, for the first lines of a run."""
    return [line for name, spec in sources.items() for line in described(name, spec.path, resolve_files(spec.path))]


def fingerprints(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """Return the fingerprint of each source's files, by name."""
    return {name: fingerprint(Reader(spec.path)) for name, spec in sources.items()}


def stamps(sources: Mapping[str, SourceSpec]) -> dict[str, str]:
    """Return a hash of each source's files, by name, that changes also when a file is overwritten.

    It covers the files' names, sizes, and times or entity tags.
    """
    digests = {}
    for name, spec in sources.items():
        files = resolve_files(spec.path).stamps
        # Paths count from the files' common directory, so the hash does not depend on where they are.
        above = len(posixpath.dirname(posixpath.commonprefix(list(files))))
        digests[name] = hashlib.sha256(
            json.dumps([(uri[above:], stamp) for uri, stamp in files.items()]).encode()
        ).hexdigest()[:16]
    return digests
