"""Packed sequences as columns with one entry per document: what laying them out needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ptf.data.sample import PackUnit, Sample


@dataclass(frozen=True, eq=False, slots=True)
class Documents:
    """The documents of packed sequences, one sequence after the other."""

    sequences: Sequence[int]  # documents of each sequence
    units: Sequence[int]  # pack units of each sequence
    owned: Sequence[int]  # documents of each pack unit
    lengths: Sequence[int]  # tokens of each document
    tokens: np.ndarray  # [tokens of all documents] int32, one document after the other
    weights: np.ndarray  # [tokens of all documents] float32
    sources: Sequence[str]
    prefix_lengths: Sequence[int]  # tokens that each document shares with an earlier one, and omits
    token_columns: Sequence[Mapping[str, np.ndarray]]  # per-token values; empty where no document has any

    @staticmethod
    def of(sequences: Sequence[Sequence[PackUnit]]) -> "Documents":
        """Return the columns of sequences that are given as pack units."""
        samples: list[Sample] = list(chain.from_iterable(chain.from_iterable(sequences)))
        token_columns = [sample.token_columns for sample in samples]
        return Documents(
            [sum(map(len, sequence)) for sequence in sequences],
            [*map(len, sequences)],
            [*map(len, chain.from_iterable(sequences))],
            [len(sample.tokens) for sample in samples],
            np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)], dtype=np.int32),
            np.concatenate([sample.loss_weights for sample in samples] or [np.zeros(0, np.float32)]),
            [sample.source for sample in samples],
            [sample.prefix_length for sample in samples],
            token_columns if any(token_columns) else (),
        )
