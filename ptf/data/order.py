"""Which rows of a source a partition reads, and in which order.

There are two ways to deal rows out. Where the number of rows in every block is known (row groups of parquet, lines on
disk), each epoch permutes the blocks of all files, numbers the rows in that order, and gives each partition a range of
the numbers. A partition then opens few blocks.

Where the number is not known (compressed files, lines in a store), or the files are to be read in their order, the rows
of all epochs are one list, and row k belongs to partition k mod partitions. Every partition then passes over all
blocks, in the order of the files or of whole files that each epoch permutes.

A partition's consecutive rows, in groups, are then permuted: all rows of a few blocks, or `window` rows. A group is one
permutation of its own key, so the rows of a partition follow from an epoch and an index.

All of it depends on (files, seed, epoch, partition) alone, and gives every row to one partition in every epoch. If the
number of rows R is no multiple of the number of partitions P, R mod P of them have one row more in an epoch e: those
with the numbers (e·R + k) mod P. Over any number of epochs, no partition reads two rows more than another.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, ReadBlock, blocks_once, fingerprint, raise_if_other_files
from ptf.data.stream import permutation
from ptf.errors import UserError

ORDER = 3  # version of the order of rows, stored in states that refer to it
# blocks whose rows are permuted together, over all partitions; fewer where blocks are large
OPEN, OPEN_LEAST, OPEN_BYTES = 64, 8, 256 << 20
BEGIN, FIRST = 2, 64  # blocks in a partition's first group, so that training begins soon, and rows of each of them


def raise_if_other_order(state: Mapping[str, Any]) -> None:
    """Raise UserError if the state of a partition or of prompts is of a version that reads rows in another order."""
    if state.get("order") != ORDER:
        raise UserError(
            "the checkpoint is of a version of ptf that read the data in another order: "
            "continue it with that version, or start a new run"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The rows of a source that are used (`limit`), by block, in the order of the files.

    Blocks without a row that is used are left out.
    """

    files: np.ndarray  # [blocks] int64
    blocks: np.ndarray  # [blocks] int64: the block's number in its file
    rows: np.ndarray  # [blocks] int64: rows that count, the first ones of the block
    lines: np.ndarray  # [blocks] int64: lines of the file before the block
    whole: np.ndarray  # [blocks] int64: all rows of the block, counted or not

    total: int  # rows that count, over all blocks

    @staticmethod
    def of(reader: Reader, counts: list[list[tuple[int, int]]] | None, limit: int | None = None) -> "Extent | None":
        """Return the extent of a source; None where the number of rows is not known.

        `counts` are the reader's. With `limit`, only the first so many rows count; files that do not know their number
        of rows are then read up to there. Raise UserError for a source without rows.
        """
        if counts is None and limit is None:
            return None
        blocks: list[tuple[int, int, int, int, int]] = []
        if counts is None:
            blocks = [(at.file, at.block, at.counted, at.before, len(at.rows)) for at in blocks_once(reader, limit)]
        left = sys.maxsize if limit is None else limit
        for file, of_file in enumerate(counts or ()):
            before = 0
            for block, (rows, lines) in enumerate(of_file):
                blocks.append((file, block, min(rows, left), before, rows))
                left, before = left - min(rows, left), before + lines
        used = [block for block in blocks if block[2]]
        if not used:
            raise UserError(f"no rows in {reader.path}")
        return Extent(*np.array(used, np.int64).T, total=sum(block[2] for block in used))


class Pieces(NamedTuple):
    """Pieces of blocks, one after the other; their rows are numbered from 0."""

    pieces: np.ndarray  # [n, 3] int64: block, first row, end
    ends: Sequence[int]  # rows up to the end of each piece

    @staticmethod
    def of(blocks: np.ndarray, first: np.ndarray, end: np.ndarray) -> "Pieces":
        """Return the pieces of some blocks, each given by its first row and its end."""
        return Pieces(np.stack([blocks, first, end], 1), np.cumsum(end - first).tolist())

    def beginning(self, blocks: int) -> "Pieces":
        """Return the same rows, at most `FIRST` of each of the first blocks before all others."""
        block, first, end = self.pieces[:blocks].T
        cut = np.minimum(first + FIRST, end)
        later = np.stack([block, cut, end], 1)[cut < end]
        return Pieces.of(*np.concatenate([np.stack([block, first, cut], 1), later, self.pieces[blocks:]]).T)


class Ordered:
    """What the partitions of a process share of a source: its reader, its number of rows, and the order of each
    epoch."""

    def __init__(self, reader: Reader, key: str, partitions: int, window: int, limit: int | None = None):
        """Make the order. `key` names the randomness; `window` is the least number of rows of a partition that are
        permuted together. With 0, rows come in the order of the files."""
        self.reader, self.key, self.partitions, self.window, self.limit = reader, key, partitions, window, limit
        counts = reader.counts()
        self.extent = Extent.of(reader, counts, limit)
        self.rows = None if self.extent is None else self.extent.total  # in an epoch; None where that is not known
        self.by_block = window > 0 and counts is not None  # blocks are permuted; otherwise whole files are, or nothing
        blocks = sum(map(len, counts or ()))
        self.open = min(OPEN, max(OPEN_LEAST, OPEN_BYTES * blocks // max(1, sum(reader.sizes))))
        self.fingerprint = fingerprint(reader)
        # epoch → the order of its blocks, and of blocks that are permuted the ranges of the partitions
        self._epochs: dict[int, tuple[Pieces, np.ndarray | None]] = {}

    def partition(self, partition: int) -> "KnownRows | UnknownRows":
        """Return the rows of a partition."""
        return UnknownRows(self, partition) if self.extent is None else KnownRows(self, partition)

    def permuted(self, n: int, *key: int) -> Sequence[int] | np.ndarray:
        """Return the order of n rows of a group that `key` names."""
        return permutation("/".join(map(str, (self.key, "rows", *key))), n) if self.window else range(n)

    def files(self, epoch: int) -> np.ndarray:
        """Return the files in the order in which they are read whole."""
        n = len(self.reader.uris)
        return permutation(f"{self.key}/files/{epoch}", n) if self.window else np.arange(n)

    def pieces(self, epoch: int, partition: int) -> Pieces:
        """Return the pieces of blocks whose rows a partition has in an epoch; where blocks are not permuted, all."""
        assert self.extent is not None
        if epoch not in self._epochs:
            # partitions are at most an epoch apart, but for those that begin
            self._epochs = {e: order for e, order in self._epochs.items() if e >= epoch - 1}
            if self.by_block:
                order = permutation(f"{self.key}/blocks/{epoch}", len(self.extent.rows))
                ranges = shares(self.extent.total, self.partitions, epoch, f"{self.key}/lanes/{epoch}")
            else:
                order, ranges = np.argsort(np.argsort(self.files(epoch))[self.extent.files], kind="stable"), None
            self._epochs[epoch] = Pieces.of(order, np.zeros_like(order), self.extent.rows[order]), ranges
        whole, ranges = self._epochs[epoch]
        if ranges is None:
            return whole
        start, end = ranges[partition].tolist()
        among = slice(bisect_right(whole.ends, start), bisect_right(whole.ends, end - 1) + 1)
        blocks, _, rows = whole.pieces[among].T
        before = np.array(whole.ends[among]) - rows
        first, last = np.maximum(start - before, 0), np.minimum(end - before, rows)
        # the first piece may be a small part of a block: moved to the end, it causes no extra block to be read early
        return Pieces.of(*(np.roll(values, -1) for values in (blocks, first, last)))


def size(rows: int, partitions: int, epoch: int, partition: int) -> int:
    """Return how many of an epoch's rows a partition has."""
    each, more = divmod(rows, partitions)
    return each + ((partition - epoch * more) % partitions < more)


def shares(rows: int, partitions: int, epoch: int, key: str) -> np.ndarray:
    """Return the first row and the end of each partition's range, [partitions, 2] int64.

    The ranges lie in an order that `key` names: neighbouring partitions, whose rows are trained side by side, should
    not read the same block.
    """
    each, more = divmod(rows, partitions)
    order = permutation(key, partitions)
    sizes = each + ((np.arange(partitions) - epoch * more) % partitions < more)
    ends = np.cumsum(sizes[order])
    ranges = np.zeros((partitions, 2), np.int64)
    ranges[order] = np.stack([ends - sizes[order], ends], 1)
    return ranges


class _Partition:
    """What both orders of a partition have in common."""

    def __init__(self, ordered: Ordered, partition: int):
        self._ordered, self._reader = ordered, ordered.reader
        self._partition, self._partitions = partition, ordered.partitions
        self.path = ordered.reader.path
        self._begin()

    def _begin(self) -> None:
        """Go to the first row."""
        raise NotImplementedError

    def at(self, file: int, block: int, row: int, epoch: int) -> RawRow:
        """Return a row that was yielded before."""
        rows = self._reader.block(file, block)
        if rows is None or row >= len(rows):
            raise changed_error(self._reader, file)
        uri, lines, extent = f"{self._reader.uris[file]}, block {block}", 0, self._ordered.extent
        if extent is not None:
            (i,) = np.flatnonzero((extent.files == file) & (extent.blocks == block))
            uri, lines = self._reader.uris[file], int(extent.lines[i])
        return RawRow(rows, row, uri, lines, epoch, file, block)


def changed_error(reader: Reader, file: int) -> UserError:
    """Return the error for a file that has changed."""
    return UserError(
        f"{reader.uris[file]} has other rows than when they were counted or stored: "
        "data files must not change while a run reads them"
    )


class KnownRows(_Partition):
    """The rows of a partition where each block's number of rows is known: row `index` of an epoch follows from the
    index."""

    def _begin(self, epoch: int = 0, index: int = 0) -> None:
        """Go to a row of an epoch, or of the first one after it in which the partition has a row: with fewer rows than
        partitions it has one not in every epoch."""
        ordered, extent = self._ordered, self._ordered.extent
        assert extent is not None
        while not (rows := size(extent.total, self._partitions, epoch, self._partition)):
            epoch += 1
        self._extent, self._epoch, self._index, self._rows = extent, epoch, index, rows
        self._pieces, self._ends = ordered.pieces(epoch, self._partition)
        # row k of the partition's epoch has the number start + k · stride in the pieces
        self._start, self._stride = 0, 1
        if not ordered.by_block:
            self._start, self._stride = (self._partition - epoch * extent.total) % self._partitions, self._partitions
        self._groups = self._block_groups() if ordered.by_block else list[int]()
        self._group = range(0)  # the rows of the group that is open

    def _block_groups(self) -> list[int]:
        """Return the number of rows up to the end of each group of blocks."""
        window, most = self._ordered.window, max(1, -(-self._ordered.open // self._partitions))
        first = 0  # pieces of a first group that is smaller than the others
        if self._epoch == 0:
            first = min(BEGIN, most, len(self._ends))
            if first < len(self._ends):
                self._pieces, self._ends = Pieces(self._pieces, self._ends).beginning(first)
        ends = self._ends
        rest = len(ends) - first
        groups = max(1, min(-(-rest // most), (self._rows - ends[first - 1] if first else self._rows) // window))
        last = [first, *(first + rest * (k + 1) // groups for k in range(groups))]
        return [ends[blocks - 1] for blocks in last if blocks]

    def _open(self) -> None:
        """Read the blocks of the next row's group, and permute the group's rows."""
        if self._ordered.by_block:
            g = bisect_right(self._groups, self._index)
            self._group = range(self._groups[g - 1] if g else 0, self._groups[g])
        else:
            first = self._index - self._index % max(1, self._ordered.window)
            self._group = range(first, min(first + max(1, self._ordered.window), self._rows))
        self._order = self._ordered.permuted(len(self._group), self._epoch, self._partition, self._group.start)
        ends = (self._start + row * self._stride for row in (self._group[0], self._group[-1]))
        first, last = (bisect_right(self._ends, number) for number in ends)
        self._blocks: dict[int, ReadBlock] = {}
        for piece in range(first, last + 1):
            pieces, extent = self._pieces[piece : piece + 2].tolist(), self._extent  # the next one is announced
            at, *following = ((int(extent.files[i]), int(extent.blocks[i])) for i, *_ in pieces)
            (i, _, end), rows = pieces[0], self._reader.block(*at, *following)
            if rows is None or len(rows) != extent.whole[i]:
                raise changed_error(self._reader, at[0])
            self._blocks[piece] = ReadBlock(rows, *at, int(extent.lines[i]), end)

    def __next__(self) -> RawRow:
        if self._index == self._rows:
            self._begin(self._epoch + 1)
        if self._index not in self._group:
            self._open()
        at = self._start + (self._group.start + int(self._order[self._index - self._group.start])) * self._stride
        piece = bisect_right(self._ends, at)
        rows, file, block, lines, end = self._blocks[piece]
        self._index += 1
        left = self._ends[piece] - at  # rows of the piece from this one on
        return RawRow(rows, end - left, self._reader.uris[file], lines, self._epoch, file, block)

    def passes(self) -> int:
        """Return the number of epochs of which every row has been yielded."""
        return self._epoch + (self._index == self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row."""
        return {"files": self._ordered.fingerprint, "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raise UserError if the files are others."""
        raise_if_other_files(self._reader, state["files"])
        self._begin(int(state["epoch"]), int(state["index"]))


class Position(NamedTuple):
    """Where the next row of files is that are read from their beginning to their end."""

    epoch: int = 0
    file: int = 0  # in the order of the epoch
    block: int = 0
    row: int = 0  # in the block
    line: int = 0  # lines of the file before the block
    dealt: int = 0  # rows that were passed over or taken, of all epochs
    epoch_start: int = 0  # `dealt` when the epoch began


class UnknownRows(_Partition):
    """The rows of a partition where the number of rows is not known: those of all epochs one after the other, row k to
    partition k mod partitions, permuted in windows that lie in one epoch. Only the rows of a window are in memory."""

    def _begin(self, position: Position = Position()) -> None:  # noqa: B008 (immutable)
        self._position, self._files = position, self._ordered.files(position.epoch).tolist()
        self._window: list[RawRow] = []
        self._began, self._index = position, 0  # where the window began, and the index of the next row in it

    def _fill(self) -> None:
        """Read a window, unless rows of one are left."""
        while self._index == len(self._window):
            self._began, self._index = self._position, 0
            self._window = list(islice(iter(self._following, None), max(1, self._ordered.window)))
            self._order = self._ordered.permuted(len(self._window), self._partition, self._began.dealt)
            if not self._window:
                epoch, *_, dealt, epoch_start = self._position
                if dealt == epoch_start:
                    raise UserError(f"no rows in {self.path}")
                self._begin(Position(epoch + 1, dealt=dealt, epoch_start=dealt))

    def _following(self) -> RawRow | None:
        """Return the partition's next row in the order of the files; None where the epoch ends."""
        while self._position.file < len(self._files):
            at, file = self._position, self._files[self._position.file]
            rows = self._reader.block(file, at.block)
            if rows is None:
                self._position = at._replace(file=at.file + 1, block=0, line=0)
                continue
            skipped = (self._partition - at.dealt) % self._partitions
            row = at.row + skipped
            if row < len(rows):
                self._position = at._replace(row=row + 1, dealt=at.dealt + skipped + 1)
                uri = self._reader.uris[file]
                return RawRow(rows.part(row, row + 1), row, uri, at.line, at.epoch, file, at.block, row)
            self._position = at._replace(
                block=at.block + 1, row=0, line=at.line + rows.lines, dealt=at.dealt + len(rows) - at.row
            )
        return None

    def __next__(self) -> RawRow:
        self._fill()
        self._index += 1
        return self._window[int(self._order[self._index - 1])]

    def passes(self) -> int:
        """Return the number of epochs of which every row has been yielded. This may read a window."""
        self._fill()
        return self._began.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row."""
        return {"files": self._ordered.fingerprint, "window": tuple(self._began), "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raise UserError if the files are others."""
        raise_if_other_files(self._reader, state["files"])
        self._begin(Position(*state["window"]))
        if state["index"]:
            self._fill()
            self._index = int(state["index"])


PartitionSource = KnownRows | UnknownRows  # the stream of one partition's rows, endless; a row knows its epoch
