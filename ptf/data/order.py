"""Which rows of a source a lane reads, and in which order.

Where the number of rows in every block is known (row groups of parquet, lines on disk), the blocks of all files are permuted each epoch, the rows in
that order are numbered, and each lane has a range of them, so it opens few blocks: it reads several of them side by side, a random one's next row at
a time. Where it is not known (compressed files, lines in a store), or where the order of the files is to be kept, the rows of all epochs are one
list, of which row k goes to lane k mod lanes; every lane then passes over all blocks, in the order of the files, or of whole files permuted.

Both are pure functions of (files, seed, epoch, lane), and give every row to one lane in every epoch. In epoch e of R rows, lane (e·R + k) mod lanes
has one more row than others for k < R mod lanes, so over any number of epochs the lanes' totals differ by one row at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ptf.data.blocks import Block, Reader
from ptf.data.sources import Place, fingerprint, refuse_other_files
from ptf.data.stream import Draws, permutation
from ptf.errors import UserError

ORDER = 2  # of rows, for those who stored places in it
OPEN, OPEN_LEAST, OPEN_BYTES = 64, 8, 256 << 20  # blocks that are read side by side, over all lanes: fewer where they are large in their files
BEGIN = 2  # blocks that a lane reads before its first row is packed, where they are large enough
GAP = 32  # rows between the openings of further blocks, at the start


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The rows of a source that count, by block, in the order of the files. Blocks without such rows are not in it."""

    files: np.ndarray  # [blocks] int64
    numbers: np.ndarray  # [blocks] int64: in its file
    rows: np.ndarray  # [blocks] int64: that count, the first ones
    lines: np.ndarray  # [blocks] int64: of its file that come before it
    whole: np.ndarray  # [blocks] int64: rows in it, counted or not

    total: int  # rows

    @staticmethod
    def of(reader: Reader, counts: list[list[tuple[int, int]]] | None, limit: int | None = None) -> "Extent | None":
        """`counts` are the reader's. None where the number of rows is not known. With `limit`, the first so many rows; files that do not tell are then
        read up to there."""
        if counts is None and limit is None:
            return None
        found: list[tuple[int, int, int, int, int]] = []
        left = limit
        for file in range(len(reader.uris)):
            number = before = 0
            while left is None or left > 0:
                if counts is not None:
                    if number == len(counts[file]):
                        break
                    rows, lines = counts[file][number]
                else:
                    block = reader.block(file, number)
                    if block is None:
                        break
                    rows, lines = len(block), block.lines
                kept = rows if left is None else min(rows, left)
                if kept:
                    found.append((file, number, kept, before, rows))
                left = None if left is None else left - kept
                number, before = number + 1, before + lines
        if not found:
            raise UserError(f"no rows in {reader.path}")
        files, numbers, kept_rows, lines_before, whole = np.array(found, np.int64).T
        return Extent(files, numbers, kept_rows, lines_before, whole, int(kept_rows.sum()))


class Ordered:
    """What the lanes of a process share of a source: its reader, how many rows it has, and the order of each epoch."""

    def __init__(self, reader: Reader, key: str, lanes: int, limit: int | None = None, shuffled: bool = True):
        """`key` names the randomness. Without `shuffled`, rows come in the order of the files."""
        self.reader, self.key, self.lanes, self.limit, self.shuffled = reader, key, lanes, limit, shuffled
        counts = reader.counts()
        self.extent = Extent.of(reader, counts, limit)
        self.by_block = shuffled and counts is not None  # blocks are permuted; else whole files are, or nothing
        blocks = sum(map(len, counts or ()))
        self.open = min(OPEN, max(OPEN_LEAST, OPEN_BYTES * blocks // max(1, sum(reader.sizes))))
        self.fingerprint = fingerprint(reader)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # order of blocks, rows up to the end of each, ranges of lanes

    @property
    def rows(self) -> int | None:
        """In an epoch; None where that is not known."""
        return None if self.extent is None else self.extent.total

    def lane(self, lane: int, window: int) -> "LaneSource":
        """The rows of a lane; `window` are the rows that are read before the first one is trained."""
        return Ranges(self, lane, window) if self.by_block else InTurn(self, lane)

    def files(self, epoch: int) -> list[int]:
        """The files in the order in which they are read whole."""
        n = len(self.reader.uris)
        return permutation(f"{self.key}/files/{epoch}", n).tolist() if self.shuffled else list(range(n))

    def pieces(self, epoch: int, lane: int) -> np.ndarray:
        """Of an epoch of permuted blocks, what a lane has: block, first row, end. [n, 3] int64"""
        assert self.extent is not None
        if not size(self.extent.total, self.lanes, epoch, lane):
            return np.zeros((0, 3), np.int64)
        if epoch not in self._epochs:
            order = permutation(f"{self.key}/blocks/{epoch}", len(self.extent.rows))
            self._epochs = {e: made for e, made in self._epochs.items() if e >= epoch - 1}  # lanes are an epoch apart at most, but for those that begin
            ranges = shares(self.extent.total, self.lanes, epoch, f"{self.key}/lanes/{epoch}")
            self._epochs[epoch] = order, np.cumsum(self.extent.rows[order]), ranges
        order, ends, ranges = self._epochs[epoch]
        start, end = ranges[lane]
        first, last = np.searchsorted(ends, [start, end - 1], "right")
        blocks = order[first : last + 1]
        before = ends[first : last + 1] - self.extent.rows[blocks]
        pieces = np.stack([blocks, np.maximum(start - before, 0), np.minimum(end - before, self.extent.rows[blocks])], 1)
        return np.roll(pieces, -1, 0)  # the first one may be a small part of a block: with whole ones fewer are read before the first row


def size(rows: int, lanes: int, epoch: int, lane: int) -> int:
    """How many of an epoch's rows a lane has."""
    each, more = divmod(rows, lanes)
    return each + ((lane - epoch * more) % lanes < more)


def shares(rows: int, lanes: int, epoch: int, key: str) -> np.ndarray:
    """First row and end of each lane's range. The ranges lie in an order that `key` names: lanes that follow each other, whose rows are trained side by
    side, are not to read the same block. [lanes, 2] int64"""
    each, more = divmod(rows, lanes)
    order = permutation(key, lanes)
    sizes = each + ((np.arange(lanes) - epoch * more) % lanes < more)
    ends = np.cumsum(sizes[order])
    found = np.zeros((lanes, 2), np.int64)
    found[order] = np.stack([ends - sizes[order], ends], 1)
    return found


class LaneSource(Protocol):
    """Stream[Place]: one lane's rows, endlessly. A place knows its epoch."""

    @property
    def path(self) -> str: ...

    def __next__(self) -> Place: ...

    def at(self, file: int, number: int, row: int, epoch: int) -> Place:
        """A row that was yielded before."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Lane:
    def __init__(self, ordered: Ordered, lane: int):
        self._ordered, self._reader, self._lane, self._lanes = ordered, ordered.reader, lane, ordered.lanes
        self.path = ordered.reader.path

    def at(self, file: int, number: int, row: int, epoch: int) -> Place:
        block = self._reader.block(file, number)
        if block is None or row >= len(block):
            raise changed(self._reader, file)
        uri, lines, extent = f"{self._reader.uris[file]}, block {number}", 0, self._ordered.extent
        if extent is not None:
            (i,) = np.flatnonzero((extent.files == file) & (extent.numbers == number))
            uri, lines = self._reader.uris[file], int(extent.lines[i])
        return Place(block, row, uri, lines, epoch, file, number)

    def _check(self, state: Mapping[str, Any]) -> None:
        refuse_other_files(self._reader, state["files"])


def changed(reader: Reader, file: int) -> UserError:
    return UserError(f"{reader.uris[file]} has other rows than when they were counted or stored: data files must not change while a run reads them")


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Rows of one epoch that a lane reads one after the other, of blocks that are open all the while."""

    epoch: int
    heads: list[list[Any]]  # as of Ranges, before the first row; none is changed
    order: np.ndarray  # [rows] int64: which of them each row is of; the rows of a head are ascending
    before: dict[str, Any]  # the state of the lane before the first row

    def counts(self, n: int) -> list[int]:
        """Of each head, its rows among the first n."""
        return np.bincount(self.order[:n], minlength=len(self.heads)).tolist()

    def state(self, n: int) -> dict[str, Any]:
        """Of the lane, behind the first n rows."""
        return self.before | {"taken": self.before["taken"] + n, "heads": [head[:2] for head in self.left(n)]}

    def left(self, n: int) -> list[list[Any]]:
        """The heads behind the first n rows; with the last row of a run one may have come to its end."""
        heads = [[head[0], head[1] + taken, *head[2:]] for head, taken in zip(self.heads, self.counts(n), strict=True)]
        ended = next((h for h, head in enumerate(heads) if head[1] == head[2]), None)
        if ended is not None:
            heads[ended] = heads[-1]
            heads.pop()
        return heads


class Ranges(_Lane):
    """Blocks permuted, each lane a range of the rows in that order, several blocks of it side by side."""

    def __init__(self, ordered: Ordered, lane: int, window: int):
        super().__init__(ordered, lane)
        assert ordered.extent is not None
        self._extent, self._window = ordered.extent, window
        self._most = max(1, -(-ordered.open // ordered.lanes))
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._taken, self._opened = epoch, 0, 0
        self._pieces = self._ordered.pieces(epoch, self._lane).tolist()
        self._heads: list[list[Any]] = []  # piece, next row, end, block, its lines before, file, number; of those that are open
        self._draw = Draws(f"{self._ordered.key}/heads/{epoch}/{self._lane}")

    def __next__(self) -> Place:
        heads, more = self._open_wanted()
        h, n = 0, len(heads)
        if n > 1:
            number = self._draw(self._taken)
            if more:
                h = number % n
            else:  # no further block will be opened: in proportion to what is left of each, so that all end about together
                number %= sum(head[2] - head[1] for head in heads)
                while (number := number - heads[h][2] + heads[h][1]) >= 0:
                    h += 1
        head = heads[h]
        row = head[1]
        head[1] = row + 1
        self._taken += 1
        if head[1] == head[2]:
            heads[h] = heads[-1]
            heads.pop()
        return Place(head[3], row, self._reader.uris[head[5]], head[4], self._epoch, head[5], head[6])

    def _open_wanted(self) -> tuple[list[list[Any]], bool]:
        """The heads, of which there is one at least, and whether further blocks will be opened."""
        while self._opened == len(self._pieces) and not self._heads:
            self._begin(self._epoch + 1)
        heads = self._heads
        if len(heads) < self._most:
            while self._opened < len(self._pieces) and len(heads) < self._wanted():
                heads.append(self._open(self._opened, None))
                self._opened += 1
        return heads, self._opened < len(self._pieces)

    def run(self, most: int, ready: Callable[[Block], bool]) -> Run | None:
        """The next rows, at most so many, as `__next__` would give them one by one. None, and nothing is taken, where an open block is not `ready`."""
        heads, more = self._open_wanted()
        if not all(ready(head[3]) for head in heads):
            return None
        if more and len(heads) < self._most:  # until the next block is opened beside them
            most = min(most, self._window + GAP * (len(heads) - BEGIN + 1) - self._taken)
        order = self._drawn(heads, most, more)
        run = Run(self._epoch, heads, order, self.state_dict())
        self._heads, self._taken = run.left(len(order)), self._taken + len(order)
        return run

    def _drawn(self, heads: list[list[Any]], most: int, more: bool) -> np.ndarray:
        """Which heads the next rows are of, at most so many, until one comes to its end."""
        n, left = len(heads), [head[2] - head[1] for head in heads]
        if n == 1:
            return np.zeros(min(most, left[0]), np.int64)
        numbers = self._draw.some(self._taken, most)
        if more:
            order = (numbers % np.uint64(n)).astype(np.int64)
            if any(count >= room for count, room in zip(np.bincount(order, minlength=n).tolist(), left, strict=True)):
                ends = [at[room - 1] for h, room in enumerate(left) if len(at := np.flatnonzero(order == h)) >= room]
                order = order[: min(ends) + 1]
            return order
        total, drawn = sum(left), []
        for number in numbers.tolist():
            number, h = number % total, 0
            while (number := number - left[h]) >= 0:
                h += 1
            drawn.append(h)
            total, left[h] = total - 1, left[h] - 1
            if not left[h]:
                break
        return np.array(drawn, np.int64)

    def _wanted(self) -> int:
        """Blocks to have open. At the start few: nothing is trained before the lane's windows are full."""
        if self._epoch:
            return self._most
        return min(self._most, BEGIN + max(0, self._taken - self._window) // GAP)

    def _open(self, piece: int, row: int | None) -> list[Any]:
        i, first, end = self._pieces[piece]
        following = self._pieces[piece + 1][0] if piece + 1 < len(self._pieces) else None
        key = None if following is None else (int(self._extent.files[following]), int(self._extent.numbers[following]))
        file, number = int(self._extent.files[i]), int(self._extent.numbers[i])
        block = self._reader.block(file, number, key)
        if block is None or len(block) != self._extent.whole[i]:
            raise changed(self._reader, file)
        return [piece, first if row is None else row, end, block, int(self._extent.lines[i]), file, number]

    def state_dict(self) -> dict[str, Any]:
        heads = [head[:2] for head in self._heads]
        return {"files": self._ordered.fingerprint, "epoch": self._epoch, "taken": self._taken, "opened": self._opened, "heads": heads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        self._begin(int(state["epoch"]))
        self._taken, self._opened = int(state["taken"]), int(state["opened"])
        self._heads = [self._open(int(piece), int(row)) for piece, row in state["heads"]]


class InTurn(_Lane):
    """The rows of all epochs one after the other, row k to lane k mod lanes."""

    def __init__(self, ordered: Ordered, lane: int):
        super().__init__(ordered, lane)
        extent = ordered.extent
        self._known: list[list[tuple[int, int, int]]] | None = None  # of each file: number, rows that count, lines before; of every block that counts
        if extent is not None:
            self._known = [[] for _ in self._reader.uris]
            for file, *block in zip(extent.files.tolist(), extent.numbers.tolist(), extent.rows.tolist(), extent.lines.tolist(), strict=True):
                self._known[file].append(tuple(block))  # type: ignore[arg-type]
        self._dealt = self._epoch_start = 0  # rows passed over or taken, and how many when the epoch began
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._files = epoch, self._ordered.files(epoch)
        self._file = self._block = self._index = self._line = 0  # the next row: file in the epoch's order, block, row, lines of the file before the block

    def __next__(self) -> Place:
        while True:
            file = self._files[self._file]
            found = self._rows(file)
            if found is None:
                self._file, self._block, self._line = self._file + 1, 0, 0
                if self._file == len(self._files):
                    if self._dealt == self._epoch_start:
                        raise UserError(f"no rows in {self.path}")
                    self._epoch_start = self._dealt
                    self._begin(self._epoch + 1)
                continue
            number, rows, line, lines = found
            ahead = (self._lane - self._dealt) % self._lanes
            if ahead < rows - self._index:
                row = self._index + ahead
                block = self._reader.block(file, number)
                if block is None or row >= len(block):
                    raise changed(self._reader, file)
                self._index, self._dealt = row + 1, self._dealt + ahead + 1
                return Place(block, row, self._reader.uris[file], line, self._epoch, file, number)
            self._dealt += rows - self._index
            self._block, self._index, self._line = self._block + 1, 0, self._line + lines

    def _rows(self, file: int) -> tuple[int, int, int, int] | None:
        """Of the next block of a file: number, rows that count, lines before it and in it; None behind the last."""
        if self._known is not None:
            blocks = self._known[file]
            return (*blocks[self._block], 0) if self._block < len(blocks) else None
        block: Block | None = self._reader.block(file, self._block)
        return None if block is None else (self._block, len(block), self._line, block.lines)

    def state_dict(self) -> dict[str, Any]:
        return {
            "files": self._ordered.fingerprint, "epoch": self._epoch, "file": self._file, "block": self._block, "index": self._index, "line": self._line,
            "dealt": self._dealt, "epoch_start": self._epoch_start,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        self._begin(int(state["epoch"]))
        self._file, self._block, self._index, self._line = (int(state[key]) for key in ("file", "block", "index", "line"))
        self._dealt, self._epoch_start = int(state["dealt"]), int(state["epoch_start"])
