"""The record from a row to the loss: a `Document` is token ids with a weight for each token's loss; a pack unit is the
documents that must be in the same packed sequence.

Documents are immutable, so the state of a window of them holds references to them. What has an entry for each token is
cut and joined here and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a pack unit was read, so that it can be read again, and the rows of the source that it stands for."""

    source: str = ""  # the source that the row was read from
    epoch: int = 0
    file: int = 0
    block: int = 0  # its number in the file
    row: int = 0
    number: int = 0  # of the unit among the row's units
    empty_before: int = 0  # rows just before it that gave no unit
    checksum: int = 0  # CRC-32 of its tokens: shows whether a unit that is read again is the same one
    rows: float = 1.0  # the rows `empty_before`, and the unit's share of its own row


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its token ids, and the weight of each token's loss."""

    tokens: np.ndarray  # [n] int32
    loss_weights: np.ndarray  # [n] float32; 0 is context
    source: str = ""
    # Per-token values, [n] or [n, k]: advantages, old_logprobs, …
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    # Number of leading tokens that are omitted because they are shared: they are the first `prefix_length` tokens of
    # the nearest document before this one in the same sequence that has `prefix_length` 0 (ptf/data/prefixes.py).
    prefix_length: int = 0
    place: Place = Place()  # noqa: RUF009 (immutable)

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, place: Place) -> "Document":
        """Return the document with its place; `dataclasses.replace` takes twice as long, for every document read."""
        return Document(self.tokens, self.loss_weights, self.source, self.token_columns, self.prefix_length, place)

    def take(self, which: slice | np.ndarray) -> "Document":
        """Return the document of some of the tokens, given as a slice or as indices."""
        return replace(
            self,
            tokens=self.tokens[which],
            loss_weights=self.loss_weights[which],
            token_columns={name: values[which] for name, values in self.token_columns.items()},
        )

    def after(self, context: np.ndarray) -> "Document":
        """Return the document behind further tokens, which have no weight and zeros in the columns."""
        return replace(
            self,
            tokens=np.concatenate([context, self.tokens]),
            loss_weights=np.concatenate([np.zeros(len(context), np.float32), self.loss_weights]),
            token_columns={
                name: np.concatenate([np.zeros((len(context), *values.shape[1:]), values.dtype), values])
                for name, values in self.token_columns.items()
            },
        )


PackUnit = tuple[Document, ...]


def length(unit: PackUnit) -> int:
    """Return the number of tokens in all documents of a pack unit."""
    if len(unit) == 1:
        return len(unit[0].tokens)
    return sum(len(document.tokens) for document in unit)
