"""Which rows of a source a partition reads, and in which order.

There are two orders. Where the number of rows in every block is known (row groups of parquet, lines on disk), each
epoch permutes the blocks of all files, numbers the rows in that order, and gives each partition a range of the numbers.
A partition then opens few blocks. It reads several of them side by side: each next row comes from a random one.

Where the number is not known (compressed files, lines in a store), or the files are to be read in their order, the rows
of all epochs are one list, and row k belongs to partition k mod partitions. Every partition then passes over all
blocks, in the order of the files or of whole files that each epoch permutes.

Both depend on (files, seed, epoch, partition) alone, and give every row to one partition in every epoch. If the number
of rows R is no multiple of the number of partitions P, R mod P of them have one row more in an epoch e: those with the
numbers (e·R + k) mod P. Over any number of epochs, no partition reads two rows more than another.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptf.data.sources.blocks import Block
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, blocks_once, fingerprint, raise_if_other_files
from ptf.data.stream import Draws, permutation
from ptf.errors import UserError

ORDER = 2  # version of the order of rows, stored in states that refer to it
# blocks that are read side by side, over all partitions; fewer where blocks are large
OPEN, OPEN_LEAST, OPEN_BYTES = 64, 8, 256 << 20
BEGIN = 2  # blocks that a partition reads before its first row is packed, if they are large enough
GAP = 32  # rows between the openings of further blocks, at the start


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
    numbers: np.ndarray  # [blocks] int64: the block's number in its file
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
            blocks = [(at.file, at.number, at.rows, at.before, len(at.block)) for at in blocks_once(reader, limit)]
        left = sys.maxsize if limit is None else limit
        for file, of_file in enumerate(counts or ()):
            before = 0
            for number, (rows, lines) in enumerate(of_file):
                blocks.append((file, number, min(rows, left), before, rows))
                left, before = left - min(rows, left), before + lines
        used = [block for block in blocks if block[2]]
        if not used:
            raise UserError(f"no rows in {reader.path}")
        files, numbers, counted_rows, lines_before, whole = np.array(used, np.int64).T
        return Extent(files, numbers, counted_rows, lines_before, whole, int(counted_rows.sum()))


class Ordered:
    """What the partitions of a process share of a source: its reader, its number of rows, and the order of each
    epoch."""

    def __init__(self, reader: Reader, key: str, partitions: int, limit: int | None = None, shuffled: bool = True):
        """Make the order. `key` names the randomness; without `shuffled`, rows come in the order of the files."""
        self.reader, self.key, self.partitions, self.limit, self.shuffled = reader, key, partitions, limit, shuffled
        counts = reader.counts()
        self.extent = Extent.of(reader, counts, limit)
        self.rows = None if self.extent is None else self.extent.total  # in an epoch; None where that is not known
        self.by_block = shuffled and counts is not None  # blocks are permuted; otherwise whole files are, or nothing is
        blocks = sum(map(len, counts or ()))
        self.open = min(OPEN, max(OPEN_LEAST, OPEN_BYTES * blocks // max(1, sum(reader.sizes))))
        self.fingerprint = fingerprint(reader)
        # epoch → the order of blocks, rows up to the end of each, ranges of partitions
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def partition(self, partition: int, window: int) -> "Ranges | RoundRobin":
        """Return the rows of a partition; `window` is the number of rows that are read before the first one is
        trained."""
        return Ranges(self, partition, window) if self.by_block else RoundRobin(self, partition)

    def files(self, epoch: int) -> list[int]:
        """Return the files in the order in which they are read whole."""
        n = len(self.reader.uris)
        return permutation(f"{self.key}/files/{epoch}", n).tolist() if self.shuffled else list(range(n))

    def pieces(self, epoch: int, partition: int) -> np.ndarray:
        """Return the pieces of permuted blocks that a partition reads in an epoch.

        They are [n, 3] int64: block, first row, end.
        """
        assert self.extent is not None
        if not size(self.extent.total, self.partitions, epoch, partition):
            return np.zeros((0, 3), np.int64)
        if epoch not in self._epochs:
            order = permutation(f"{self.key}/blocks/{epoch}", len(self.extent.rows))
            # partitions are at most an epoch apart, but for those that begin
            self._epochs = {e: order for e, order in self._epochs.items() if e >= epoch - 1}
            ranges = shares(self.extent.total, self.partitions, epoch, f"{self.key}/lanes/{epoch}")
            self._epochs[epoch] = order, np.cumsum(self.extent.rows[order]), ranges
        order, ends, ranges = self._epochs[epoch]
        start, end = ranges[partition]
        first, last = np.searchsorted(ends, [start, end - 1], "right")
        blocks = order[first : last + 1]
        before = ends[first : last + 1] - self.extent.rows[blocks]
        pieces = np.stack(
            [blocks, np.maximum(start - before, 0), np.minimum(end - before, self.extent.rows[blocks])], 1
        )
        # the first piece may be a small part of a block: moved to the end, it causes no extra block to be read early
        return np.roll(pieces, -1, 0)


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

    def at(self, file: int, number: int, row: int, epoch: int) -> RawRow:
        """Return a row that was yielded before."""
        block = self._reader.block(file, number)
        if block is None or row >= len(block):
            raise changed_error(self._reader, file)
        uri, lines, extent = f"{self._reader.uris[file]}, block {number}", 0, self._ordered.extent
        if extent is not None:
            (i,) = np.flatnonzero((extent.files == file) & (extent.numbers == number))
            uri, lines = self._reader.uris[file], int(extent.lines[i])
        return RawRow(block, row, uri, lines, epoch, file, number)


def changed_error(reader: Reader, file: int) -> UserError:
    """Return the error for a file that has changed."""
    return UserError(
        f"{reader.uris[file]} has other rows than when they were counted or stored: "
        "data files must not change while a run reads them"
    )


class Ranges(_Partition):
    """The rows of permuted blocks: each partition has a range of the rows in that order, and reads several blocks of it
    side by side."""

    def __init__(self, ordered: Ordered, partition: int, window: int):
        super().__init__(ordered, partition)
        assert ordered.extent is not None
        self._extent, self._window = ordered.extent, window
        self._most = max(1, -(-ordered.open // ordered.partitions))
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._taken, self._opened = epoch, 0, 0
        self._pieces = self._ordered.pieces(epoch, self._partition).tolist()
        self._rows = sum(end - first for _, first, end in self._pieces)
        # the open blocks: piece, next row, end, block, lines before it, file, number
        self._open_blocks: list[list[Any]] = []
        self._draw = Draws(f"{self._ordered.key}/heads/{epoch}/{self._partition}")

    def __next__(self) -> RawRow:
        open_blocks, more = self._open_wanted()
        h, n = 0, len(open_blocks)
        if n > 1:
            number = self._draw(self._taken)
            if more:
                h = number % n
            else:
                # no further block will be opened: draw in proportion to the rows left, so that all end at about once
                number %= self._rows - self._taken
                while (number := number - open_blocks[h][2] + open_blocks[h][1]) >= 0:
                    h += 1
        cursor = open_blocks[h]
        row = cursor[1]
        cursor[1] = row + 1
        self._taken += 1
        if cursor[1] == cursor[2]:
            open_blocks[h] = open_blocks[-1]
            open_blocks.pop()
        return RawRow(cursor[3], row, self._reader.uris[cursor[5]], cursor[4], self._epoch, cursor[5], cursor[6])

    def _open_wanted(self) -> tuple[list[list[Any]], bool]:
        """Open blocks as needed; return them, at least one, and whether further blocks will be opened."""
        if self._opened == len(self._pieces) and not self._open_blocks:
            epoch = self._epoch + 1
            while not size(self._extent.total, self._partitions, epoch, self._partition):
                epoch += 1  # with fewer rows than partitions, a partition has a row not in every epoch
            self._begin(epoch)
        open_blocks = self._open_blocks
        if len(open_blocks) < self._most:
            # at the start few, because nothing is trained before the partition's windows are full
            wanted = self._most if self._epoch else BEGIN + max(0, self._taken - self._window) // GAP
            while self._opened < len(self._pieces) and len(open_blocks) < min(self._most, wanted):
                open_blocks.append(self._open(self._opened, None))
                self._opened += 1
        return open_blocks, self._opened < len(self._pieces)

    def _open(self, piece: int, row: int | None) -> list[Any]:
        """Open the block of a piece, and announce the next one to the reader."""
        i, first, end = self._pieces[piece]
        following = self._pieces[piece + 1][0] if piece + 1 < len(self._pieces) else None
        key = None if following is None else (int(self._extent.files[following]), int(self._extent.numbers[following]))
        file, number = int(self._extent.files[i]), int(self._extent.numbers[i])
        block = self._reader.block(file, number, key)
        if block is None or len(block) != self._extent.whole[i]:
            raise changed_error(self._reader, file)
        return [piece, first if row is None else row, end, block, int(self._extent.lines[i]), file, number]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row."""
        open_blocks = [cursor[:2] for cursor in self._open_blocks]
        return {
            "files": self._ordered.fingerprint,
            "epoch": self._epoch,
            "taken": self._taken,
            "opened": self._opened,
            "heads": open_blocks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raise UserError if the files are others."""
        raise_if_other_files(self._reader, state["files"])
        self._begin(int(state["epoch"]))
        self._taken, self._opened = int(state["taken"]), int(state["opened"])
        self._open_blocks = [self._open(int(piece), int(row)) for piece, row in state["heads"]]


class RoundRobin(_Partition):
    """The rows of all epochs one after the other, row k to partition k mod partitions."""

    def __init__(self, ordered: Ordered, partition: int):
        super().__init__(ordered, partition)
        extent = ordered.extent
        # for each file, its blocks with rows that count: number, rows, lines before
        self._known: list[list[tuple[int, int, int]]] | None = None
        if extent is not None:
            self._known = [[] for _ in self._reader.uris]
            for file, number, rows, line in zip(
                extent.files.tolist(), extent.numbers.tolist(), extent.rows.tolist(), extent.lines.tolist(), strict=True
            ):
                self._known[file].append((number, rows, line))
        self._dealt = self._epoch_start = 0  # rows passed over or taken, and how many when the epoch began
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._files = epoch, self._ordered.files(epoch)
        # the next row: file in the epoch's order, block, row, lines of the file before the block
        self._file = self._block = self._index = self._line = 0

    def __next__(self) -> RawRow:
        while True:
            file = self._files[self._file]
            block_rows = self._rows(file)
            if block_rows is None:
                self._file, self._block, self._line = self._file + 1, 0, 0
                if self._file == len(self._files):
                    if self._dealt == self._epoch_start:
                        raise UserError(f"no rows in {self.path}")
                    self._epoch_start = self._dealt
                    self._begin(self._epoch + 1)
                continue
            number, rows, line, lines = block_rows
            skipped = (self._partition - self._dealt) % self._partitions
            if skipped < rows - self._index:
                row = self._index + skipped
                block = self._reader.block(file, number)
                if block is None or row >= len(block):
                    raise changed_error(self._reader, file)
                self._index, self._dealt = row + 1, self._dealt + skipped + 1
                return RawRow(block, row, self._reader.uris[file], line, self._epoch, file, number)
            self._dealt += rows - self._index
            self._block, self._index, self._line = self._block + 1, 0, self._line + lines

    def _rows(self, file: int) -> tuple[int, int, int, int] | None:
        """Return number, rows that count, and lines before and in the next block of a file; None after the last."""
        if self._known is not None:
            blocks = self._known[file]
            return (*blocks[self._block], 0) if self._block < len(blocks) else None
        block: Block | None = self._reader.block(file, self._block)
        return None if block is None else (self._block, len(block), self._line, block.lines)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row."""
        return {
            "files": self._ordered.fingerprint,
            "epoch": self._epoch,
            "file": self._file,
            "block": self._block,
            "index": self._index,
            "line": self._line,
            "dealt": self._dealt,
            "epoch_start": self._epoch_start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raise UserError if the files are others."""
        raise_if_other_files(self._reader, state["files"])
        self._begin(int(state["epoch"]))
        self._file, self._block, self._index, self._line = (
            int(state[key]) for key in ("file", "block", "index", "line")
        )
        self._dealt, self._epoch_start = int(state["dealt"]), int(state["epoch_start"])


PartitionSource = Ranges | RoundRobin  # the stream of one partition's rows, endless; a row knows its epoch
