"""The encoded stream of a source in a partition: its rows, read and encoded to stream units, one after the other.

A stream unit that waits in a partition's windows is identified by the place that it was read from: a state holds
places, and the process that continues from the state reads the stream units again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ptf.data import tokenized
from ptf.data.baskets import reorder_baskets
from ptf.data.encode import COUNTS, Encoder
from ptf.data.order import PartitionSource, Ranges
from ptf.data.sample import PackUnit
from ptf.data.sources.rows import RawRow
from ptf.data.stream import Deferred
from ptf.data.stream_units import StreamUnit, after_empty_rows, place_of, stored_units, stream_units_of
from ptf.data.unit_block import UnitBlock, dump
from ptf.errors import UserError


class Encoded:
    """Stream[StreamUnit]: the samples of a partition's rows, one after the other.

    It ends if no row of the partition will ever give a sample, although rows of other partitions do.
    """

    def __init__(
        self,
        name: str,
        source: PartitionSource,
        encoder: Encoder,
        reread_encoder: Encoder,
        patience: int,
        any_sample: Callable[[], bool],
        reorder: str | None,
    ):
        """Make the stream.

        `reread_encoder` encodes rows that were encoded before. After `patience` epochs without a sample, `any_sample`
        is called to find whether any row of the source gives one. `reorder` names the randomness by which baskets are
        reordered.
        """
        self._name, self._source = name, source
        self._encoder, self._reread_encoder = encoder, reread_encoder
        self._patience, self._any_sample, self._reorder = patience, any_sample, reorder
        self._pending: list[StreamUnit] = []  # units of the last row, the next one last
        self._empty_rows = 0  # rows without a sample since the last row with one
        self._last_epoch = 0  # the epoch of the last row with a sample
        self._ended = False

    def __next__(self) -> StreamUnit:
        while not self._pending:
            if self._ended:
                raise StopIteration
            row = next(self._source)
            if self._empty_rows and row.epoch - self._last_epoch > self._patience:
                if not self._any_sample():
                    raise UserError(f"no row of {self._source.path} left a sample to train on: {self._encoder.counts}")
                self._ended = True
            self._pending = self._items(row, self._encoder(row), self._empty_rows)[::-1]
            self._empty_rows = 0 if self._pending else self._empty_rows + 1
            if self._pending:
                self._last_epoch = row.epoch
        return self._pending.pop()

    def _items(self, row: RawRow, units: Sequence[PackUnit], empty_rows: int) -> list[StreamUnit]:
        """Return the stream units of one row."""
        if self._reorder is not None:
            units = [
                reorder_baskets(unit, f"{self._reorder}/{(row.epoch, row.file, row.number, row.row, i)}")
                for i, unit in enumerate(units)
            ]
        return stream_units_of(units, self._name, row.epoch, (row.file, row.number), row.row, empty_rows)

    def run(self, most: int) -> UnitBlock | None:
        """Return the stream units of the next rows, at most `most` rows, without the cost of each row by itself.

        Return None where `__next__` must be used.
        """
        encoder = self._encoder
        if (
            self._empty_rows
            or self._pending
            or self._ended
            or self._reorder
            or not isinstance(encoder, tokenized.TokenizedEncoder)
            or not isinstance(self._source, Ranges)
        ):
            return None
        rows = self._source.run(most, encoder.fits)
        if rows is None:
            return None
        before = {"without": self._empty_rows, "found": self._last_epoch, "ended": False}
        units_of_heads, recorded = [], []
        ends: list[int] | None = None
        for head, n in zip(rows.open_blocks, rows.counts(len(rows.order)), strict=True):
            block, first, at = head[3], head[1], (head[5], head[6])
            recorded.append(block.row_counts[first : first + n])
            if block.simple(first, first + n):
                units_of_heads.append(iter(stored_units(block, first, first + n, self._name, rows.epoch, at)))
            else:
                ends = []
                units = map(block.units, range(first, first + n))
                found = [stream_units_of(one, self._name, rows.epoch, at, first + i, 0) for i, one in enumerate(units)]
                units_of_heads.append(iter(found))
        items: list[Any] = list(map(next, map(units_of_heads.__getitem__, rows.order.tolist())))
        counts = encoder.counted(np.concatenate(recorded)[_row_order(rows.order)])
        if ends is not None:
            items, ends = self._flat(items)
        if items:
            self._last_epoch = rows.epoch
        encoder.counts = dict(zip(COUNTS, counts[-1].tolist(), strict=True))
        return UnitBlock(items, rows.epoch, rows, ends, counts, before)

    def _flat(self, rows: Sequence[Any]) -> tuple[list[StreamUnit], list[int]]:
        """Return the stream units of rows, each of which gave one or a list of them, and the number of rows read with
        each."""
        items: list[StreamUnit] = []
        ends: list[int] = []
        for i, row in enumerate(rows):
            if isinstance(row, tuple):
                row = [row]
            if not row:
                self._empty_rows += 1
                continue
            if self._empty_rows:
                row = [after_empty_rows(row[0], self._empty_rows), *row[1:]]
                self._empty_rows = 0
            items += row
            ends += [i + 1] * len(row)
        return items, ends

    def counts(self) -> Mapping[str, int]:
        """Return the encoder's counts."""
        return self._encoder.counts

    def dump(self, items: Sequence[StreamUnit]) -> np.ndarray:
        """Return the places and checksums of stream units."""
        return dump(items)

    def load(self, places: np.ndarray) -> list[StreamUnit]:
        """Read the samples of places again, every row once.

        Raise UserError where another sample is found.
        """
        by_place: dict[tuple[int, ...], StreamUnit] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, i, empty_rows, _ = key
            at = self._source.at(file, number, row, epoch)
            items = self._items(at, self._reread_encoder(at), empty_rows)
            if i >= len(items) or place_of(items[i]) != key:
                raise UserError(
                    f"{at.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
            by_place[key] = items[i]
        return [by_place[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last stream unit; `settle` finishes it."""
        return {
            "source": self._source.state_dict(),
            "counts": dict(self._encoder.counts),
            "pending": Deferred(tuple(self._pending), self.dump),
            "without": self._empty_rows,
            "found": self._last_epoch,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._source.load_state_dict(state["source"])
        self._encoder.counts = dict(state["counts"])
        self._empty_rows, self._last_epoch, self._ended = (
            int(state["without"]),
            int(state["found"]),
            bool(state["ended"]),
        )
        self._pending = self.load(state["pending"])


def _row_order(order: np.ndarray) -> np.ndarray:
    """Return where each row that is read lies among the heads' rows, which are listed head by head.

    The result is [rows] int64.
    """
    at = np.empty(len(order), np.int64)
    at[np.argsort(order, kind="stable")] = np.arange(len(order))
    return at
