"""Causal attention inside each document of packed sequences by attention.cpp.

Nothing is copied into batches, no length is filled up, and a shared prefix is attended to where it lies. Every document
is computed by itself, so its bits depend neither on its neighbours nor on the number of threads.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ptf.model.attention import Attention, PerDocument, soft_cap_of
from ptf.model.cpu_kernels.library import library, run, takes
from ptf.model.delta_rule import Documents
from ptf.model.matrix_product import differentiable_once


def computes(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel computes an attention of these tensors; where not, PerDocument does."""
    plain = takes(q, k, v) and soft_cap_of(layer) is None and q.shape[-1] == v.shape[-1]
    return plain and q.shape[-1] % library().width == 0


class Layout:
    """Where the documents of a batch lie: `documents` [n, 4], as attention.cpp reads them, family by family."""

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        starts, lengths, *_ = Documents.of(segments)
        shared = positions.reshape(-1).numpy()[starts]
        first = shared == 0  # of its family
        assert not len(starts) or first[0], "a shared prefix comes before what continues it"
        prefix = np.maximum.accumulate(np.where(first, starts, 0))
        work = np.add.reduceat(lengths * (lengths + 2 * shared), np.flatnonzero(first)) if len(starts) else lengths
        place = np.empty_like(work)
        place[np.argsort(-work, kind="stable")] = np.arange(len(work))  # the longest first, so no thread ends late
        order = np.argsort(place[np.cumsum(first) - 1], kind="stable")
        table = np.stack((starts, lengths, prefix, shared), 1).astype(np.int64)[order]
        self.documents = torch.from_numpy(np.ascontiguousarray(table))
        self.families = torch.from_numpy(np.append(np.flatnonzero(table[:, 3] == 0), len(table)).astype(np.int64))
        self.padded = int(lengths.sum()) < segments.numel()

    def empty(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor like x [rows, heads, dim], in another dtype if one is given, for a result: padding is 0."""
        return (torch.zeros_like if self.padded else torch.empty_like)(x, dtype=dtype)


class _Attention(Function):
    """The attention of [rows, heads, dim]: queries, keys, values, and sinks [heads] or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Layout, window: int, scale: float
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = layout.empty(q), torch.full((q.shape[1], len(q)), float("inf"), dtype=torch.float32)
        wide = None if sinks is None else sinks.detach().float().contiguous()
        ctx.settings = layout, window, scale
        run("attention", q, k, v, wide, out, lse, *_shape(q, k, ctx.settings))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        layout, *_ = ctx.settings
        dq, dk, dv = layout.empty(q), layout.empty(k, torch.float32), layout.empty(v, torch.float32)
        delta, upstream = torch.zeros_like(lse), grads[0].contiguous()
        run("attention_backward", q, k, v, out, lse, upstream, dq, dk, dv, delta, *_shape(q, k, ctx.settings))
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = -((sinks.float()[:, None] - lse).exp() * delta).sum(1).to(sinks.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


def _shape(q: Tensor, k: Tensor, settings: tuple[Layout, int, float]) -> tuple[Tensor | int | float, ...]:
    layout, window, scale = settings
    rows, heads, dim = q.shape
    where = layout.documents, layout.families, len(layout.families) - 1
    return *where, rows, heads, k.shape[1], dim, window, float(scale)


class CpuAttention:
    """The attention of a batch by the kernel; `PerDocument` computes what the kernel does not (`computes`)."""

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.layout = Layout(segments, positions)
        self.place = segments, positions

    @cached_property
    def others(self) -> PerDocument:
        """The attention of this batch by torch."""
        return PerDocument(*self.place)

    def __call__(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, T, heads, V]; the arguments are those of `Attend`."""
        if not computes(layer, q, k, v):
            return self.others(layer, q, k, v)
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out = _Attention.apply(*flat, layer.sinks, self.layout, layer.window or 0, layer.scale)
        return out.unflatten(0, q.shape[:2])

    def delta(self, layer: Any, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See Attend."""
        return self.others.delta(layer, qkv, decay, beta)
