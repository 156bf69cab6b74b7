"""The encoded stream of a source in a partition: its rows, read and encoded to pack units, one after the other.

A unit that waits in a partition's windows is identified by the place that it was read from: a state holds places, and
the process that continues from the state reads the units again.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptf.data.baskets import reorder_baskets
from ptf.data.document import PackUnit, Place
from ptf.data.encode import Encoder
from ptf.data.order import PartitionSource
from ptf.data.sources.rows import RawRow
from ptf.errors import UserError


@dataclass(eq=False)
class Encoded:
    """Passes[PackUnit]: the samples of a partition's rows, one after the other.

    It ends if no row of the partition will ever give a sample, although rows of other partitions do.
    """

    name: str
    source: PartitionSource
    encoder: Encoder
    reread_encoder: Callable[[], Encoder]  # makes one for rows that were encoded before
    patience: int  # epochs without a sample, after which `any_sample` says whether any row of the source gives one
    any_sample: Callable[[], bool]
    reorder: str  # names the randomness by which the events of a basket are permuted each time it is read
    _pending: list[PackUnit] = field(default_factory=list)  # units of the last row, the next one last
    _empty_rows: int = 0  # rows without a sample since the last row with one
    _last_epoch: int = 0  # the epoch of the last row with a sample
    _ended: bool = False

    def __next__(self) -> PackUnit:
        self._read()
        if not self._pending:
            raise StopIteration
        return self._pending.pop()

    def passes(self) -> int | None:
        """Return the epochs of which every unit has been yielded; None at the end. This may read the next rows."""
        self._read()
        return self._pending[-1][0].place.epoch if self._pending else None

    def _read(self) -> None:
        """Read rows until one gives a unit, unless units are left."""
        while not self._pending and not self._ended:
            row = next(self.source)
            if self._empty_rows and row.epoch - self._last_epoch > self.patience:
                if not self.any_sample():
                    raise UserError(f"no row of {self.source.path} left a sample to train on: {self.encoder.counts}")
                self._ended = True
            self._pending = self._placed(row, self.encoder(row), self._empty_rows)[::-1]
            self._empty_rows = 0 if self._pending else self._empty_rows + 1
            if self._pending:
                self._last_epoch = row.epoch

    def _placed(self, row: RawRow, units: Sequence[PackUnit], empty_rows: int) -> list[PackUnit]:
        """Return the units of one row with their places; those of baskets in an order that the place names."""
        placed, at = [], (row.epoch, row.file, row.block, row.row)
        for i, unit in enumerate(units):
            ordered, empty, crc = reorder_baskets(unit, self.reorder, (*at, i)), 0 if i else empty_rows, 0
            for document in ordered:
                crc = zlib.crc32(document.tokens.data, crc)
            place = Place(self.name, *at, i, empty, crc, empty + 1 / len(units))
            placed.append(tuple(document.at(place) for document in ordered))
        return placed

    def read_again(self, places: Iterable[Place]) -> dict[Place, PackUnit]:
        """Read the units of places again, in the order of the files.

        Raise UserError where another unit is found.
        """
        found, encode = dict[Place, PackUnit](), self.reread_encoder()
        for place in sorted(set(places)):
            row = self.source.at(place.file, place.block, place.row, place.epoch)
            units = self._placed(row, encode(row), place.empty_before)
            if place.number >= len(units) or units[place.number][0].place != place:
                raise UserError(
                    f"{row.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
            found[place] = units[place.number]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last unit."""
        return {
            "source": self.source.state_dict(),
            "counts": dict(self.encoder.counts),
            "pending": [tuple(unit[0].place) for unit in self._pending],
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
        places = [Place(*place) for place in state["pending"]]
        again = self.read_again(places)
        self._pending = [again[place] for place in places]
