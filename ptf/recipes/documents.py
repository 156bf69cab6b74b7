"""What losses over whole documents read from a batch: sums over trained tokens, last positions, and pairs."""

import torch
from torch import Tensor

from ptf.data.batch import Batch


def sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum values over the trained positions of each document, each with weight 1: [B, T] → [documents]."""
    return batch.per_document(values, (batch.loss_weights != 0).to(values.dtype))


def document_weights(batch: Batch) -> Tensor:
    """Return how much each document counts, [documents]: its row's `weight`, or 0 where it trains nothing."""
    index, flat = batch.segments.reshape(-1) + 1, batch.loss_weights.reshape(-1)
    return flat.new_zeros(len(batch.lengths) + 1).scatter_reduce(0, index, flat, "amax")[1:]


def ends(batch: Batch) -> Tensor:
    """Return the index of each document's last token in the flattened sequences: [documents], int64."""
    index = batch.segments.reshape(-1) + 1
    positions = torch.arange(index.numel(), device=index.device)
    return positions.new_zeros(len(batch.lengths) + 1).scatter_reduce(0, index, positions, "amax")[1:]


def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices of the first and the second document of each pair, [pairs] each."""
    return batch.pairs, batch.pairs + 1
