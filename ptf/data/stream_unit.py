"""A stream unit is what the streams of a partition yield: a pack unit, and the place that it was read from."""

import zlib
from typing import NamedTuple

import numpy as np

from ptf.data.sample import PackUnit, length


class StreamUnit(NamedTuple):
    """A pack unit of a partition."""

    unit: PackUnit
    source: str  # the source that the row was read from
    epoch: int
    file: int
    block: int  # its number in the file
    row: int
    number: int  # of the unit among the row's units
    empty_before: int  # rows just before it that gave no unit
    rows: float  # rows that the unit stands for: the rows `empty_before`, and the unit's share of its own row

    @property
    def length(self) -> int:
        """The tokens of the pack unit."""
        return length(self.unit)

    @property
    def place(self) -> tuple[int, ...]:
        """Epoch, file, block, row, number in the row, empty rows before it, checksum.

        When the stream unit is read again, the checksum of its tokens shows whether it is the same one.
        """
        crc = 0
        for sample in self.unit:
            crc = zlib.crc32(np.ascontiguousarray(sample.tokens).data, crc)
        return *self[2:8], crc - (1 << 31)
