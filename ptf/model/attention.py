"""Grouped-query attention, and who may attend to whom.

The one idea: the projections are the same everywhere; what differs between training on packed rows and generating with a cache is an
`Attend`, which is handed in. Documents of a packed row never see each other: on a CPU each is a sequence of its own (no mask at all, so
nothing can leak), on a GPU FlexAttention skips the blocks between documents.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig
from ptf.model.layers import Parts, RMSNorm
from ptf.model.rope import Table, rotate


class Attend(Protocol):
    def __call__(self, of: "Attention", q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, heads, D], [B, T, kv_heads, D] twice → [B, T, heads, D]; `of` has the window, the scale and the sinks."""
        ...


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int, parts: Parts, path: str) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.window = c.kinds[layer].window
        self.scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        self.q_proj = parts.linear(f"{path}.q_proj", c.dim, c.heads * c.head_dim, c.qkv_bias)
        self.k_proj = parts.linear(f"{path}.k_proj", c.dim, c.kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = parts.linear(f"{path}.v_proj", c.dim, c.kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = parts.linear(f"{path}.o_proj", c.heads * c.head_dim, c.dim, c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, c.norm_offset) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, c.norm_offset) if c.qk_norm else nn.Identity()
        self.sinks = Parameter(torch.zeros(c.heads)) if c.sinks else None

    def forward(self, x: Tensor, rope: Table, attend: Attend) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, heads, D]
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.o_proj(attend(self, q, k, v).flatten(-2))


@functools.cache
def has_tiles() -> bool:
    """Whether this CPU multiplies matrices of bf16 (AMX). Without, torch's attention takes longer over bf16 than over the same in fp32: on an AMD EPYC, of 64
    new tokens with 128 before each, 5.0 ms, and with both conversions 1.2; of a document of 192, there and back, 4.6 and 2.2."""
    return torch.cpu._is_amx_tile_supported()


def sdpa(of: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Torch's attention with this layer's scale and sinks. [n, heads, Tq, D], [n, kv_heads, Tk, D] twice; `seen` [.., Tq, Tk] or None for causal.

    A sink is one more key, before all others, of value 0: a further dimension holds its logit on the query's side, 1 on its own and 0 on the
    other keys'. A query is put before the others to match, so that causality alone lets each query see it.
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not has_tiles():
        return sdpa(of, q.float(), k.float(), v.float(), seen).to(q.dtype)
    if of.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True, scale=of.scale)
    logit = (of.sinks.to(q.dtype) / of.scale)[:, None, None].expand(*q.shape[:3], 1)
    q = torch.cat((q, logit), -1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + 1)
    key[..., -1] = 1
    k, v = torch.cat((key, F.pad(k, (0, 1))), 2), F.pad(v, (0, 1, 1, 0))
    if seen is None:
        out = F.scaled_dot_product_attention(F.pad(q, (0, 0, 1, 0)), k, v, is_causal=True, enable_gqa=True, scale=of.scale)[:, :, 1:]
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(seen, (1, 0), value=True), enable_gqa=True, scale=of.scale)
    return out[..., :-1]


class PerDocument:
    """Causal attention inside each document, as a few dense batches of documents of like length.

    A shorter document is filled up on the right; causality alone keeps its tokens from seeing the filling. On 2 CPU cores this is 2.2 to 2.7
    times a dense block mask, and FlexAttention has no backward there (torch 2.13). A document that goes on from another's beginning has that
    before it, and what those tokens see is dropped.
    """

    ratio = 1.25  # longest to shortest in one batch: at most a fifth of it is filling

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        flat = segments.reshape(-1).numpy()
        starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 1))
        lengths = np.diff(starts, append=len(flat))
        real = flat[starts] >= 0
        starts, lengths = starts[real], lengths[real]
        begins = positions.reshape(-1).numpy()[starts]
        whole = np.maximum.accumulate(np.where(begins == 0, starts, 0))  # where the document starts whose first `begins` tokens come before each
        lengths = lengths + begins
        order = np.argsort(lengths, kind="stable")
        self.groups: list[tuple[Tensor, Tensor | None]] = []
        back = np.full(len(flat), -1, np.int64)  # where in the joined results each position lies; padding takes the row of zeros at the end
        done = first = 0
        while first < len(order):
            last = int(np.searchsorted(lengths[order], lengths[order[first]] * self.ratio, side="right"))
            members = order[first:last]
            width = int(lengths[members[-1]])
            step = np.arange(width)
            before = step < begins[members][:, None]  # [n, width]
            inside = (step < lengths[members][:, None]) & ~before
            own = (starts - begins)[members][:, None] + np.minimum(step, lengths[members][:, None] - 1)
            index = np.where(before, whole[members][:, None] + step, own)
            kept = index[inside]
            back[kept] = done + np.arange(len(kept))
            done += len(kept)
            keep = None if inside.all() else torch.from_numpy(np.flatnonzero(inside.reshape(-1)))
            self.groups.append((torch.from_numpy(index), keep))
            first = last
        back[back < 0] = done
        self.back = torch.from_numpy(back)

    def __call__(self, of: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [t.flatten(0, 1) for t in (q, k, v)]  # [B·T, heads, D]
        parts = []
        for index, keep in self.groups:
            a, b, c = (t.index_select(0, index.reshape(-1)).unflatten(0, index.shape).transpose(1, 2) for t in flat)  # [n, heads, width, D]
            out = sdpa(of, a, b, c, band(index.shape[1], of.window)).transpose(1, 2).flatten(0, 1)
            parts.append(out if keep is None else out.index_select(0, keep))
        parts.append(flat[0].new_zeros(1, *flat[0].shape[1:]))
        return torch.cat(parts).index_select(0, self.back).view_as(q)  # indexing with brackets takes three times as long there and back


@functools.lru_cache(maxsize=64)
def band(width: int, window: int | None) -> Tensor | None:
    """Who sees whom in a document of this width, [width, width]; None where causality alone says it."""
    if window is None or window >= width:
        return None
    at = torch.arange(width)
    return (at[:, None] >= at) & (at[:, None] - at < window)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float) -> tuple[Tensor, Tensor]:
    """[B, heads, T, D] and the log-sum-exp of each query, [B, heads, T]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, more = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))  # type: ignore[misc]
    return out, more.lse


@functools.cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex, dynamic=False)


class Flex:
    """The same on a GPU: one FlexAttention call a layer whose block mask is causal inside each document, one mask a window. A sink takes its
    share of the softmax afterwards: out · sigmoid(log-sum-exp − sink)."""

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.segments, self.positions = segments, positions
        at = torch.arange(segments.shape[1], device=segments.device)
        starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        last = lambda which: torch.where(which, at, 0).cummax(1).values  # noqa: E731
        self.begins = positions.gather(1, last(starts))  # of each token's document
        self.whole = segments.gather(1, last(starts & (positions == 0)))  # the document whose first `begins` tokens come before it
        self.masks: dict[int | None, object] = {}

    def mask(self, window: int | None) -> object:
        from torch.nn.attention.flex_attention import create_block_mask

        segments, positions, begins, whole = self.segments, self.positions, self.begins, self.whole

        def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            before = (whole[b, q] == segments[b, k]) & (positions[b, k] < begins[b, q])
            return (q >= k) & ((segments[b, q] == segments[b, k]) | before)

        last = positions - (window or 0)  # the last position that a query does not see: compared, not subtracted, which would make numbers for each pair

        def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return inside(b, h, q, k) & (positions[b, k] > last[b, q])

        if window not in self.masks:
            visible = inside if window is None else near
            self.masks[window] = create_block_mask(visible, segments.shape[0], None, segments.shape[1], segments.shape[1], device=segments.device)
        return self.masks[window]

    def __call__(self, of: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = _compiled_flex()(q, k, v, self.mask(of.window), of.scale)
        if of.sinks is not None:
            out = out * torch.sigmoid(lse - of.sinks.float()[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)


def backend(device: torch.device) -> type[PerDocument] | type[Flex]:
    return Flex if device.type == "cuda" else PerDocument
