"""What losses over whole documents read from a batch: sums over trained tokens, last positions, and pairs."""

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.model.head import Scalar
from ptf.model.model import Model


def sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum values over the trained positions of each document, each with weight 1: [B, T] → [documents]."""
    return batch.per_document(values, (batch.loss_weights != 0).to(values.dtype))


def document_weights(batch: Batch) -> Tensor:
    """Return how much each document counts, [documents]: its row's `weight`, or 0 where it trains nothing."""
    return largest(batch.loss_weights, batch)


def episode_shares(batch: Batch) -> Tensor:
    """Return the share of its episode's sampled tokens that each document has, [documents].

    It is 1 except for an episode that was split into several samples, whose documents add up to 1.
    """
    counts = sums(torch.ones_like(batch.loss_weights), batch)
    if "episode_tokens" not in batch.token_columns:
        return torch.ones_like(counts)
    of_episode = largest(batch.token_columns["episode_tokens"], batch)  # 0 in a document that is a whole episode
    return torch.where(of_episode > 0, counts / of_episode.clamp(min=1), 1.0)


def ends(batch: Batch) -> Tensor:
    """Return the index of each document's last token in the flattened sequences: [documents], int64."""
    return largest(torch.arange(batch.segments.numel(), device=batch.segments.device), batch)


def largest(values: Tensor, batch: Batch) -> Tensor:
    """Return the largest of the values at the positions of each document, none of which is negative: [documents]."""
    index, values = batch.segments.reshape(-1) + 1, values.reshape(-1)  # padding has the index 0
    return values.new_zeros(len(batch.lengths) + 1).scatter_reduce(0, index, values, "amax")[1:]


def last_values(model: Model, batch: Batch) -> Tensor:
    """Return the output of a model with a scalar head at each document's last token: [documents], fp32."""
    return values_at(model, batch, ends(batch))


def values_at(model: Model, batch: Batch, positions: Tensor) -> Tensor:
    """Return the output of a model with a scalar head at these indices of the flattened sequences, in fp32."""

    def head_fn(x: Tensor, head: Scalar) -> Tensor:
        return head.values(x.flatten(0, 1).index_select(0, positions))

    return batch.through(model, head_fn)


def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices of the first and the second document of each pair, [pairs] each."""
    return batch.pairs, batch.pairs + 1
