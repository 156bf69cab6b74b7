"""Semantic ids: an item's id has one code per level, and similar items share codes.

The codes are a residual quantisation of the items' vectors by k-means (RQ-k-means, Deng et al. 2025; Rajput et al. 2023
use an autoencoder).

The last level only distinguishes items with equal codes, so every item has its own id, and all ids have the same
length. It has spare codes for new items, so that the ids of the other items do not change.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ptf.errors import UserError

SPARE = 2.0  # codes of the last level, as a multiple of the number needed


@dataclass
class SemanticIds:
    """The codes of a catalogue: the centres of every level, and the number of items with each code."""

    centres: list[np.ndarray]  # one per level: [codes, d]
    last: int  # number of codes of the last level
    taken: dict[tuple[int, ...], int] = field(default_factory=dict)  # codes → number of items that have them

    @staticmethod
    def fit(vectors: np.ndarray, levels: Sequence[int], seed: int = 0) -> "SemanticIds":
        """Fit the centres to vectors [items, d]. `levels` is the number of codes of each level but the last.

        Raises UserError if `levels` is empty or too long, or if a level has fewer than 2 codes or more than the items.
        """
        from sklearn.cluster import KMeans

        if (
            not levels
            or len(levels) > len(string.ascii_lowercase) - 1
            or any(not isinstance(n, int) or not 1 < n <= len(vectors) for n in levels)
        ):
            raise UserError(
                f"levels must be 1 to {len(string.ascii_lowercase) - 1} numbers of codes from 2 to {len(vectors)} "
                f"(the items), not {levels}"
            )
        rest, centres = vectors.astype(np.float64), []
        for level, codes in enumerate(levels):
            clusters = KMeans(codes, n_init=4, random_state=seed + level).fit(rest)  # type: ignore[arg-type]
            centres.append(clusters.cluster_centers_)
            rest = rest - clusters.cluster_centers_[clusters.labels_]
        fitted = SemanticIds(centres, 0)
        _, counts = np.unique(fitted.codes(vectors), axis=0, return_counts=True)
        fitted.last = int(np.ceil(counts.max() * SPARE))
        return fitted

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        """Return the codes of vectors, [items, d] → [items, levels].

        On each level, the code is that of the nearest centre to the residual of the previous levels.
        """
        rest, codes = vectors.astype(np.float64), []
        for centres in self.centres:
            nearest = (
                ((rest[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
                if len(rest) * centres.size < 1e8
                else ((centres**2).sum(1) - 2 * rest @ centres.T).argmin(1)  # without a table of all differences
            )
            codes.append(nearest)
            rest = rest - centres[nearest]
        return np.stack(codes, 1)

    def texts(self, vectors: np.ndarray) -> list[str]:
        """Return ids for new items, in order; ids that were assigned before do not change.

        Raises UserError if the last level is full.
        """
        texts = []
        for codes in map(tuple, self.codes(vectors).tolist()):
            number = self.taken.get(codes, 0)
            if number >= self.last:
                raise UserError(
                    f"{number + 1} items have the codes {codes}, but the last level has only {self.last} codes: "
                    "fit the ids again, with more codes per level"
                )
            self.taken[codes] = number + 1
            texts.append(
                "".join(
                    f"<{letter}_{code}>" for letter, code in zip(string.ascii_lowercase, (*codes, number), strict=False)
                )
            )
        return texts

    def tokens(self) -> list[str]:
        """Return the tokens of all levels, including the last."""
        sizes = [*(len(centres) for centres in self.centres), self.last]
        return [
            f"<{letter}_{code}>"
            for letter, size in zip(string.ascii_lowercase, sizes, strict=False)
            for code in range(size)
        ]

    def rows(self) -> np.ndarray:
        """Return initial embeddings of the tokens, in the order of `tokens`, [tokens, d].

        They are the centres; codes of the last level get zeros, since they have no meaning.
        """
        return np.concatenate([*self.centres, np.zeros((self.last, self.centres[0].shape[1]))])

    def save(self, path: Path) -> None:
        """Write the ids to a file; `load` is the inverse. They must be saved again after `texts` assigned new ids."""
        taken = np.array([[*codes, count] for codes, count in self.taken.items()], np.int64).reshape(
            len(self.taken), len(self.centres) + 1
        )
        centres: Any = {f"centres_{level}": centres for level, centres in enumerate(self.centres)}
        np.savez(path, last=self.last, taken=taken, **centres)

    @staticmethod
    def load(path: Path) -> "SemanticIds":
        """Read ids that `save` wrote."""
        with np.load(path) as stored:
            centres = [
                stored[f"centres_{level}"] for level in range(sum(name.startswith("centres_") for name in stored.files))
            ]
            taken = {tuple(int(code) for code in row[:-1]): int(row[-1]) for row in stored["taken"]}
            return SemanticIds(centres, int(stored["last"]), taken)
