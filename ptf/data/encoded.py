"""The encoded stream of a source in a partition: its rows, read and encoded to pack units, one after the other.

A unit that waits in a partition's windows is identified by the place that it was read from: a state holds places, and
the process that continues from the state reads the units again.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptf.data.baskets import reorder_baskets
from ptf.data.document import PackUnit, Place
from ptf.data.encode import Encoder
from ptf.data.order import PartitionSource
from ptf.data.sources.rows import RawRow
from ptf.data.stream import Deferred
from ptf.errors import UserError


@dataclass(eq=False)
class Encoded:
    """Stream[PackUnit]: the samples of a partition's rows, one after the other.

    It ends if no row of the partition will ever give a sample, although rows of other partitions do.
    """

    name: str
    source: PartitionSource
    encoder: Encoder
    reread_encoder: Encoder  # for rows that were encoded before
    patience: int  # epochs without a sample, after which `any_sample` says whether any row of the source gives one
    any_sample: Callable[[], bool]
    reorder: str  # names the randomness by which the events of a basket are permuted each time it is read
    _pending: list[PackUnit] = field(default_factory=list)  # units of the last row, the next one last
    _empty_rows: int = 0  # rows without a sample since the last row with one
    _last_epoch: int = 0  # the epoch of the last row with a sample
    _ended: bool = False

    def __next__(self) -> PackUnit:
        while not self._pending:
            if self._ended:
                raise StopIteration
            row = next(self.source)
            if self._empty_rows and row.epoch - self._last_epoch > self.patience:
                if not self.any_sample():
                    raise UserError(f"no row of {self.source.path} left a sample to train on: {self.encoder.counts}")
                self._ended = True
            self._pending = self._placed(row, self.encoder(row), self._empty_rows)[::-1]
            self._empty_rows = 0 if self._pending else self._empty_rows + 1
            if self._pending:
                self._last_epoch = row.epoch
        return self._pending.pop()

    def _placed(self, row: RawRow, units: Sequence[PackUnit], empty_rows: int) -> list[PackUnit]:
        """Return the units of one row with their places; those of baskets in an order that the place names."""
        row_place, placed = (row.epoch, row.file, row.number, row.row), []
        for i, unit in enumerate(units):
            empty = 0 if i else empty_rows
            place = Place(self.name, *row_place, i, empty, empty + 1 / len(units))
            ordered = reorder_baskets(unit, f"{self.reorder}/{(*row_place, i)}")
            placed.append(tuple(replace(document, place=place) for document in ordered))
        return placed

    def dump(self, units: Sequence[PackUnit]) -> np.ndarray:
        """Return the places and checksums of units, [units, 7] int32."""
        return np.array([_identity(unit) for unit in units], np.int32).reshape(-1, 7)

    def load(self, places: np.ndarray) -> list[PackUnit]:
        """Read the units of places again, every row once.

        Raise UserError where another unit is found.
        """
        by_place: dict[tuple[int, ...], PackUnit] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, i, empty_rows, _ = key
            at = self.source.at(file, number, row, epoch)
            units = self._placed(at, self.reread_encoder(at), empty_rows)
            if i >= len(units) or _identity(units[i]) != key:
                raise UserError(
                    f"{at.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
            by_place[key] = units[i]
        return [by_place[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last unit; `settle` finishes it."""
        return {
            "source": self.source.state_dict(),
            "counts": dict(self.encoder.counts),
            "pending": Deferred(tuple(self._pending), self.dump),
            "without": self._empty_rows,
            "found": self._last_epoch,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.source.load_state_dict(state["source"])
        self.encoder.counts = dict(state["counts"])
        self._empty_rows, self._last_epoch, self._ended = (
            int(state["without"]),
            int(state["found"]),
            bool(state["ended"]),
        )
        self._pending = self.load(state["pending"])


def _identity(unit: PackUnit) -> tuple[int, ...]:
    """Return epoch, file, block, row, number in the row, empty rows before it, and checksum of a unit.

    When the unit is read again, the checksum of its tokens shows whether it is the same one.
    """
    crc = 0
    for document in unit:
        crc = zlib.crc32(np.ascontiguousarray(document.tokens).data, crc)
    return *unit[0].place[1:7], crc - (1 << 31)
