"""Sequence parallelism: the residual stream sliced along the sequence over a tensor group (Korthikanti et al., Reducing
Activation Recomputation, 2022).

Between two projections that are sharded over the group every rank holds T / ranks of the positions, so norms and
residuals cost and keep that much less.

Inputs are gathered, and outputs are summed and sliced again; each is the other's backward.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

Exchange = Callable[[Tensor, ProcessGroup], Tensor]


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather [B, t, D] of each rank to [B, t · ranks, D]."""
    x = x.transpose(0, 1).contiguous()
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_single(whole, x, group=group)
    return whole.transpose(0, 1).contiguous()


def _summed_slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the ranks and return this rank's [B, T / ranks, D] of the sum."""
    x = x.transpose(0, 1).contiguous()
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(part, x, group=group)
    return part.transpose(0, 1).contiguous()


def _own_slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's [B, T / ranks, D] of [B, T, D]."""
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum x over the ranks."""
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole


class _Exchange(Function):
    """An exchange between the ranks of a group, and that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, exchange: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        return exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grads[0], ctx.group), None, None, None


def all_gather(x: Tensor, group: ProcessGroup, whole_gradient: bool = False) -> Tensor:
    """Gather [B, t, D] to [B, t · ranks, D].

    In the backward pass the gradient is summed over the ranks and cut (reduce-scatter), because each has a part of it.
    With `whole_gradient` each rank has the whole gradient already, which is only cut.
    """
    return cast("Tensor", _Exchange.apply(x, group, _gathered, _own_slice if whole_gradient else _summed_slice))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the ranks and return this rank's [B, T / ranks, D]. T must be a multiple of the ranks."""
    return cast("Tensor", _Exchange.apply(x, group, _summed_slice, _gathered))


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum x over the ranks, each of which goes on with the sum in its own way: so are its gradients summed."""
    return cast("Tensor", _Exchange.apply(x, group, _summed, _summed))


def fill_up(tokens: Tensor, positions: Tensor, segments: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad [B, T] tensors on the right so that T is a multiple of `ranks`."""
    more = -tokens.shape[1] % ranks
    pad = torch.nn.functional.pad
    return pad(tokens, (0, more)), pad(positions, (0, more)), pad(segments, (0, more), value=-1)
