"""The encoded stream of a source in a partition: its rows, read and encoded to stream units, one after the other.

A stream unit that waits in a partition's windows is identified by the place that it was read from: a state holds
places, and the process that continues from the state reads the stream units again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ptf.data.baskets import reorder_baskets
from ptf.data.encode import Encoder
from ptf.data.order import PartitionSource
from ptf.data.sample import PackUnit
from ptf.data.sources.rows import RawRow
from ptf.data.stream import Deferred
from ptf.data.stream_unit import StreamUnit
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
        self.encoder, self._reread_encoder = encoder, reread_encoder
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
                    raise UserError(f"no row of {self._source.path} left a sample to train on: {self.encoder.counts}")
                self._ended = True
            self._pending = self._items(row, self.encoder(row), self._empty_rows)[::-1]
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
        n, place = len(units), (self._name, row.epoch, row.file, row.number, row.row)
        return [
            StreamUnit(unit, *place, i, 0 if i else empty_rows, (0 if i else empty_rows) + 1 / n)
            for i, unit in enumerate(units)
        ]

    def dump(self, items: Sequence[StreamUnit]) -> np.ndarray:
        """Return the places and checksums of stream units, [stream units, 7] int32."""
        return np.array([item.place for item in items], np.int32).reshape(-1, 7)

    def load(self, places: np.ndarray) -> list[StreamUnit]:
        """Read the samples of places again, every row once.

        Raise UserError where another sample is found.
        """
        by_place: dict[tuple[int, ...], StreamUnit] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, i, empty_rows, _ = key
            at = self._source.at(file, number, row, epoch)
            items = self._items(at, self._reread_encoder(at), empty_rows)
            if i >= len(items) or items[i].place != key:
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
            "counts": dict(self.encoder.counts),
            "pending": Deferred(tuple(self._pending), self.dump),
            "without": self._empty_rows,
            "found": self._last_epoch,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._source.load_state_dict(state["source"])
        self.encoder.counts = dict(state["counts"])
        self._empty_rows, self._last_epoch, self._ended = (
            int(state["without"]),
            int(state["found"]),
            bool(state["ended"]),
        )
        self._pending = self.load(state["pending"])
