"""Consecutive pack units that the stream of a tokenized source yields at once, with the state of the stream after each
of them, so that a checkpoint may fall between any two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptf.data.encode import COUNTS
from ptf.data.order import RowRun
from ptf.data.stream import Deferred
from ptf.data.stream_units import StreamUnit, place_of


@dataclass(frozen=True, eq=False, slots=True)
class UnitBlock:
    """Consecutive stream units of one epoch in a partition of tokenized rows, and `Encoded`'s state after each of
    them."""

    items: list[StreamUnit]
    epoch: int
    rows: RowRun
    ends: list[int] | None  # for each unit, how many of the rows are read when it is taken; None: one a row
    counts: np.ndarray  # [rows + 1, len(COUNTS)] int64: the encoder's counts after so many rows
    before: dict[str, Any]  # the state before the first unit, without `source` and `counts`

    def state(self, n: int) -> dict[str, Any]:
        """Return the state after the first n stream units."""
        rows = self._read(n)
        pending = (
            ()
            if self.ends is None
            else tuple(self.items[k] for k in range(len(self.items) - 1, n - 1, -1) if self.ends[k] == rows)
        )
        taken = {"without": 0, "found": self.epoch} if n else {}
        return (
            self.before
            | {"source": self.rows.state(rows), "counts": self.counted(n), "pending": Deferred(pending, dump)}
            | taken
        )

    def counted(self, n: int) -> dict[str, int]:
        """Return the encoder's counts after the first n stream units."""
        return dict(zip(COUNTS, self.counts[self._read(n)].tolist(), strict=True))

    def _read(self, n: int) -> int:
        """Return how many rows are read to take the first n stream units."""
        return n if self.ends is None or not n else self.ends[n - 1]


def dump(items: Sequence[StreamUnit]) -> np.ndarray:
    """Return the places and checksums of stream units, [stream units, 7] int32."""
    return np.array([place_of(item) for item in items], np.int32).reshape(-1, 7)
