"""What losses over whole documents read from a batch: sums over each one's trained tokens, its last position, and which two are a pair."""

import torch
from torch import Tensor

from ptf.data.batch import Batch


def sums(values: Tensor, batch: Batch) -> Tensor:
    """Over the trained positions of each document: [B, T] → [documents], each counting 1 whatever the row's weight."""
    return batch.per_document(values, (batch.weights != 0).to(values.dtype))


def weights(batch: Batch) -> Tensor:
    """How much each document counts: its row's `weight`; 0 where it trains nothing. [documents]"""
    index, flat = batch.segments.reshape(-1) + 1, batch.weights.reshape(-1)
    return flat.new_zeros(len(batch.lengths) + 1).scatter_reduce(0, index, flat, "amax")[1:]


def ends(batch: Batch) -> Tensor:
    """Where the last token of each document is in the flattened rows: [documents], int64."""
    index = batch.segments.reshape(-1) + 1
    places = torch.arange(index.numel(), device=index.device)
    return places.new_zeros(len(batch.lengths) + 1).scatter_reduce(0, index, places, "amax")[1:]


def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """The documents that are the first and the second of an atom of two: indices, [pairs] each."""
    first = (batch.atoms[1:] == batch.atoms[:-1]).nonzero().squeeze(1)
    return first, first + 1
