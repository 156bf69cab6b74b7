"""What an encoder makes of a row: a `Sample` is one document as ids and weights; an `Atom` is the samples that must share a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: ids, and how much each token counts when it is the target."""

    tokens: np.ndarray  # [n] int32
    weights: np.ndarray  # [n] float32; 0 is context
    source: str = ""
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)  # [n] or [n, k]: advantages, old_logprobs, …

    def __len__(self) -> int:
        return len(self.tokens)

    def state(self) -> dict:
        return {"tokens": self.tokens, "weights": self.weights, "source": self.source, "streams": dict(self.streams)}


Atom = tuple[Sample, ...]


def length(atom: Atom) -> int:
    """Tokens in all of an atom's samples."""
    return sum(len(s) for s in atom)


def atom_state(atom: Atom) -> list[dict]:
    return [s.state() for s in atom]


def load_atom(state: list[dict]) -> Atom:
    return tuple(Sample(**s) for s in state)
