"""Sequence parallelism: the residual stream sliced along the sequence over a tensor group (Korthikanti et al., Reducing
Activation Recomputation, 2022).

Between two projections that are sharded over the group every rank holds T / ranks of the positions, so norms and
residuals cost and keep that much less.

Inputs are gathered, and outputs are summed and sliced again; each is the other's backward.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


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


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, whole_gradient: bool) -> Tensor:
        ctx.group, ctx.whole_gradient = group, whole_gradient
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.whole_gradient:
            return grads[0].chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None, None
        return _summed_slice(grads[0], ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed_slice(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


def all_gather(x: Tensor, group: ProcessGroup, whole_gradient: bool = False) -> Tensor:
    """Gather [B, t, D] to [B, t · ranks, D].

    In the backward pass the gradient is summed over the ranks and cut (reduce-scatter), because each has a part of it.
    With `whole_gradient` each rank has the whole gradient already, which is only cut.
    """
    return cast("Tensor", _AllGather.apply(x, group, whole_gradient))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the ranks and return this rank's [B, T / ranks, D]. T must be a multiple of the ranks."""
    return cast("Tensor", _ReduceScatter.apply(x, group))


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum x over the ranks, each of which goes on with the sum in its own way: so are its gradients summed."""
    return cast("Tensor", _SumOver.apply(x, group))


def fill_up(tokens: Tensor, positions: Tensor, segments: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad [B, T] tensors on the right so that T is a multiple of `ranks`."""
    more = -tokens.shape[1] % ranks
    pad = torch.nn.functional.pad
    return pad(tokens, (0, more)), pad(positions, (0, more)), pad(segments, (0, more), value=-1)
