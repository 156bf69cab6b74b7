"""Grouped-query attention, and who may attend to whom.

The one idea: the projections are the same everywhere; what differs between training on packed rows and generating with a cache is an
`Attend`, which is handed in. Documents of a packed row never see each other: on a CPU each is a sequence of its own (no mask at all, so
nothing can leak), on a GPU FlexAttention skips the blocks between documents.
"""

import functools
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptf.model.config import DecoderConfig
from ptf.model.layers import RMSNorm, linear
from ptf.model.rope import rotate


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, heads, D], [B, T, kv_heads, D] twice → [B, T, heads, D]."""
        ...


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.q_proj = linear(c.dim, c.heads * c.head_dim)
        self.k_proj = linear(c.dim, c.kv_heads * c.head_dim)
        self.v_proj = linear(c.dim, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.dim)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, heads, D]
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class PerDocument:
    """Causal attention inside each document, as a few dense batches of documents of like length.

    A shorter document is filled up on the right; causality alone keeps its tokens from seeing the filling. On 2 CPU cores this is 2.2 to 2.7
    times a dense block mask, and FlexAttention has no backward there (torch 2.13).
    """

    ratio = 1.25  # longest to shortest in one batch: at most a fifth of it is filling

    def __init__(self, segments: Tensor) -> None:
        flat = segments.reshape(-1).numpy()
        starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 1))
        lengths = np.diff(starts, append=len(flat))
        real = flat[starts] >= 0
        starts, lengths = starts[real], lengths[real]
        order = np.argsort(lengths, kind="stable")
        self.groups: list[tuple[Tensor, Tensor | None]] = []
        back = np.full(len(flat), -1, np.int64)  # where in the joined results each position lies; padding takes the row of zeros at the end
        done = first = 0
        while first < len(order):
            last = int(np.searchsorted(lengths[order], lengths[order[first]] * self.ratio, side="right"))
            members = order[first:last]
            width = int(lengths[members[-1]])
            step = np.arange(width)
            inside = step < lengths[members][:, None]  # [n, width]
            index = starts[members][:, None] + np.minimum(step, lengths[members][:, None] - 1)
            kept = index[inside]
            back[kept] = done + np.arange(len(kept))
            done += len(kept)
            keep = None if inside.all() else torch.from_numpy(np.flatnonzero(inside.reshape(-1)))
            self.groups.append((torch.from_numpy(index), keep))
            first = last
        back[back < 0] = done
        self.back = torch.from_numpy(back)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [t.flatten(0, 1) for t in (q, k, v)]  # [B·T, heads, D]
        parts = []
        for index, keep in self.groups:
            a, b, c = (t[index.reshape(-1)].unflatten(0, index.shape).transpose(1, 2) for t in flat)  # [n, heads, width, D]
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
            parts.append(out if keep is None else out[keep])
        parts.append(flat[0].new_zeros(1, *flat[0].shape[1:]))
        return torch.cat(parts)[self.back].view_as(q)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class Flex:
    """The same on a GPU: one FlexAttention call a layer whose block mask is causal inside each document."""

    def __init__(self, segments: Tensor) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (segments[b, q] == segments[b, k])

        self.mask = create_block_mask(mask, segments.shape[0], None, segments.shape[1], segments.shape[1], device=segments.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return _compiled_flex()(q, k, v, block_mask=self.mask, enable_gqa=True).transpose(1, 2)


def backend(device: torch.device) -> type[PerDocument] | type[Flex]:
    return Flex if device.type == "cuda" else PerDocument
