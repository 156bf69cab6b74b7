"""The output of an encoder: a `Sample` is one document as token ids and weights; a pack unit is the samples that must
be in the same packed sequence.

Samples and units are immutable, so the state of a window of them holds references to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

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


def dump_units(units: Sequence[PackUnit]) -> dict[str, Any]:
    """Return pack units as columns that hold arrays, strings, lists and dicts only; `load_units` is the inverse."""
    samples = [s for unit in units for s in unit]
    names = sorted({name for s in samples for name in s.token_columns})
    owners = {name: [i for i, s in enumerate(samples) if name in s.token_columns] for name in names}
    return {
        # These names are stored in files and checkpoints, and stay as the first version had them.
        "atoms": np.array([len(unit) for unit in units], np.int32),  # samples in each pack unit
        "lengths": np.array([len(s) for s in samples], np.int32),
        "begins": np.array([s.prefix_length for s in samples], np.int32),  # the prefix lengths
        "tokens": np.concatenate([s.tokens for s in samples] or [np.zeros(0, np.int32)]),
        "weights": np.concatenate([s.loss_weights for s in samples] or [np.zeros(0, np.float32)]),
        "sources": [s.source for s in samples],
        "streams": {  # the token columns
            name: {
                "samples": np.array(owners[name], np.int32),
                "values": np.concatenate([samples[i].token_columns[name] for i in owners[name]]),
            }
            for name in names
        },
    }


def load_units(state: Mapping[str, Any]) -> list[PackUnit]:
    """Return the pack units that `dump_units` wrote."""
    lengths = np.asarray(state["lengths"])
    # All samples without per-token values share one dict, since many dicts slow down the garbage collector.
    token_columns: list[Mapping[str, np.ndarray]] = [{}] * len(lengths)
    for name, column in state["streams"].items():
        owners = np.asarray(column["samples"])
        for i, values in zip(owners.tolist(), _pieces(column["values"], lengths[owners]), strict=True):
            token_columns[i] = {**token_columns[i], name: values}
    samples = map(
        Sample,
        _pieces(state["tokens"], lengths),
        _pieces(state["weights"], lengths),
        state["sources"],
        token_columns,
        np.asarray(state["begins"]).tolist(),
    )
    return [tuple(islice(samples, n)) for n in np.asarray(state["atoms"]).tolist()]


def _pieces(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return `values` cut into consecutive pieces of the given lengths."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
