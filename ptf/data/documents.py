"""Packed rows as columns, one entry a document: what laying them out needs, however they came."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ptf.data.sample import Atom, Sample


@dataclass(frozen=True, eq=False, slots=True)
class Documents:
    """The documents of rows, one row after the other."""

    rows: Sequence[int]  # documents of each row
    atoms: Sequence[int]  # atoms of each row
    owned: Sequence[int]  # documents of each atom
    tokens: Sequence[np.ndarray]
    weights: np.ndarray  # [tokens of all] float32
    sources: Sequence[str]
    begins: Sequence[int]
    streams: Sequence[Mapping[str, np.ndarray]]  # nothing where no document has any

    @staticmethod
    def of(rows: Sequence[Sequence[Atom]]) -> "Documents":
        samples: list[Sample] = list(chain.from_iterable(chain.from_iterable(rows)))
        streams = [sample.streams for sample in samples]
        return Documents(
            [sum(map(len, row)) for row in rows], [*map(len, rows)], [*map(len, chain.from_iterable(rows))], [sample.tokens for sample in samples],
            np.concatenate([sample.weights for sample in samples] or [np.zeros(0, np.float32)]), [sample.source for sample in samples],
            [sample.begins for sample in samples], streams if any(streams) else (),
        )  # fmt: skip
