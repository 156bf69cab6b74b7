"""What an encoder makes of a row: a `Sample` is one document as ids and weights; an `Atom` is the samples that must share a row.

The one idea: both never change once made, so a window of them is saved by holding on to it, and written out as a few long arrays.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: ids, and how much each token counts when it is the target."""

    tokens: np.ndarray  # [n] int32
    weights: np.ndarray  # [n] float32; 0 is context
    source: str = ""
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)  # [n] or [n, k]: advantages, old_logprobs, …
    begins: int = 0  # position of the first token; before it come as many of the row's last sample before it that is whole (ptf/data/prefixes.py)

    def __len__(self) -> int:
        return len(self.tokens)


def samples_of(
    tokens: Sequence[np.ndarray], weights: Sequence[np.ndarray], sources: Sequence[str], streams: Sequence[Mapping[str, np.ndarray]]
) -> list[Sample]:
    """Many at once. Each attribute is set for all of them together, since a frozen class takes 0.7 us to make a sample by itself, and this 0.3."""
    made = list(map(object.__new__, repeat(Sample, len(tokens))))
    for name, values in {"tokens": tokens, "weights": weights, "source": sources, "streams": streams, "begins": repeat(0)}.items():
        deque(map(getattr(Sample, name).__set__, made, values), 0)
    return made


Atom = tuple[Sample, ...]


def length(atom: Atom) -> int:
    """Tokens in all of an atom's samples."""
    if len(atom) == 1:
        return len(atom[0].tokens)
    return sum(len(s.tokens) for s in atom)


def dump_atoms(atoms: Sequence[Atom]) -> dict[str, Any]:
    """Atoms as columns: arrays, strings, lists and dicts only. `load_atoms` is the inverse."""
    samples = [s for atom in atoms for s in atom]
    names = sorted({name for s in samples for name in s.streams})
    owners = {name: [i for i, s in enumerate(samples) if name in s.streams] for name in names}
    return {
        "atoms": np.array([len(atom) for atom in atoms], np.int32),  # samples in each
        "lengths": np.array([len(s) for s in samples], np.int32),
        "begins": np.array([s.begins for s in samples], np.int32),
        "tokens": np.concatenate([s.tokens for s in samples] or [np.zeros(0, np.int32)]),
        "weights": np.concatenate([s.weights for s in samples] or [np.zeros(0, np.float32)]),
        "sources": [s.source for s in samples],
        "streams": {
            name: {"samples": np.array(owners[name], np.int32), "values": np.concatenate([samples[i].streams[name] for i in owners[name]])} for name in names
        },
    }


def load_atoms(state: Mapping[str, Any]) -> list[Atom]:
    lengths = np.asarray(state["lengths"])
    streams: list[Mapping[str, np.ndarray]] = [{}] * len(lengths)  # one for all that have none: each dict is work for the garbage collector
    for name, column in state["streams"].items():
        owners = np.asarray(column["samples"])
        for i, values in zip(owners.tolist(), _pieces(column["values"], lengths[owners]), strict=True):
            streams[i] = {**streams[i], name: values}
    begins = np.asarray(state["begins"])
    samples = samples_of(_pieces(state["tokens"], lengths), _pieces(state["weights"], lengths), state["sources"], streams)
    if begins.any():
        samples = [replace(sample, begins=n) if n else sample for sample, n in zip(samples, begins.tolist(), strict=True)]
    found = iter(samples)
    return [tuple(islice(found, n)) for n in np.asarray(state["atoms"]).tolist()]


def _pieces(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """One after the other."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
