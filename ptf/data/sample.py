"""The output of an encoder: a `Sample` is one document as token ids and weights; a pack unit is the samples that must
be in the same packed sequence.

Samples and units are immutable, so the state of a window of them holds references to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: its token ids, and the weight of each token's loss."""

    tokens: np.ndarray  # [n] int32
    loss_weights: np.ndarray  # [n] float32; 0 is context
    source: str = ""
    # Per-token values, [n] or [n, k]: advantages, old_logprobs, …
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    # Number of leading tokens that are omitted because they are shared: they are the first `prefix_length` tokens of
    # the nearest sample before this one in the same sequence that has `prefix_length` 0 (ptf/data/prefixes.py).
    prefix_length: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


PackUnit = tuple[Sample, ...]


def length(unit: PackUnit) -> int:
    """Return the number of tokens in all samples of a pack unit."""
    if len(unit) == 1:
        return len(unit[0].tokens)
    return sum(len(s.tokens) for s in unit)
