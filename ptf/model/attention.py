"""Grouped-query and latent attention: the projections, which are the same everywhere. How tokens attend is given by an
`Attend` (kernels/attention.py)."""

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig
from ptf.model.kernels.attention import Attend
from ptf.model.layers import LayerFactory, RMSNorm
from ptf.model.rope import Table


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, c: DecoderConfig, layer: int, factory: LayerFactory, path: str) -> None:
        super().__init__()
        self.layer, self.head_dim, self.kernels = layer, c.head_dim, factory.kernels
        self.window = c.layers[layer].window
        self.scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        self.softcap = c.attention_softcap
        # with a gate, each head's rows are those of its query, then those of its gate
        self.q_proj = factory.linear(f"{path}.q_proj", c.dim, c.heads * c.head_dim * (1 + c.attention_gate), c.qkv_bias)
        self.k_proj = factory.linear(f"{path}.k_proj", c.dim, c.kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = factory.linear(f"{path}.v_proj", c.dim, c.kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = factory.linear(f"{path}.o_proj", c.heads * c.head_dim, c.dim, c.out_bias)
        self.gated = c.attention_gate
        of_head, of_width = (RMSNorm if wanted else nn.Identity for wanted in (c.qk_norm, c.qk_width_norm))
        self.q_norm = of_head(c.head_dim, c.norm_eps, c.norm_offset, factory.kernels)
        self.k_norm = of_head(c.head_dim, c.norm_eps, c.norm_offset, factory.kernels)
        self.q_width_norm = of_width(c.heads * c.head_dim, c.norm_eps, False, factory.kernels)
        self.k_width_norm = of_width(c.kv_heads * c.head_dim, c.norm_eps, False, factory.kernels)
        self.sinks = Parameter(torch.zeros(c.heads)) if c.sinks else None

    def forward(self, x: Tensor, rope: Table, attend: Attend) -> Tensor:
        """Return the attention output [B, T, D] for x [B, T, D]."""
        q, k, v = self.q_proj(x), self.k_width_norm(self.k_proj(x)), self.v_proj(x)
        gate = None
        if self.gated:
            q, gate = (t.flatten(-2) for t in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (self.q_width_norm(q), k, v))  # [B, T, heads, D]
        q, k = self.kernels.rotate(self.q_norm(q), rope), self.kernels.rotate(self.k_norm(k), rope)
        if len(rope) > 2:
            q = q * rope[2].to(q.dtype)
        out = attend(self, q, k, v).flatten(-2)
        return self.o_proj(out if gate is None else out * gate.sigmoid())


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, and keys with values, are made of narrow
    projections of the token.

    Of a query and a key only the last dimensions are rotated, and those of the keys are the same for all heads. Tokens
    attend as in `Attention`, with as many key heads as query heads, and values that may be narrower than keys. A cache
    holds keys and values as they are, and not the narrow projection that they are made of.
    """

    sinks = None

    def __init__(self, c: DecoderConfig, layer: int, factory: LayerFactory, path: str) -> None:
        super().__init__()
        assert c.latent is not None
        self.layer, self.head_dim, self.value_dim = layer, c.head_dim, c.value_dim
        self.rotated, self.interleaved = c.latent.rotated, c.latent.interleaved
        self.window, self.kernels = c.layers[layer].window, factory.kernels
        self.scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        rank, width = c.latent.query_rank, c.latent.key_rank
        if rank is None:
            self.q_proj = factory.linear(f"{path}.q_proj", c.dim, c.heads * c.head_dim)
        else:
            self.q_a_proj = factory.linear(f"{path}.q_a_proj", c.dim, rank, c.qkv_bias)
            self.q_a_norm = RMSNorm(rank, c.latent.norm_eps, c.norm_offset, factory.kernels)
            self.q_b_proj = factory.linear(f"{path}.q_b_proj", rank, c.heads * c.head_dim)
        self.to_queries = ("q_proj",) if rank is None else ("q_a_proj", "q_a_norm", "q_b_proj")  # one after the other
        self.kv_a_proj = factory.linear(f"{path}.kv_a_proj", c.dim, width + c.latent.rotated, c.qkv_bias)
        self.kv_a_norm = RMSNorm(width, c.latent.norm_eps, c.norm_offset, factory.kernels)
        self.kv_b_proj = factory.linear(
            f"{path}.kv_b_proj", width, c.heads * (c.head_dim - c.latent.rotated + c.value_dim)
        )
        self.o_proj = factory.linear(f"{path}.o_proj", c.heads * c.value_dim, c.dim, c.out_bias)

    def forward(self, x: Tensor, rope: Table, attend: Attend) -> Tensor:
        """Return the attention output [B, T, D] for x [B, T, D]."""
        plain = self.head_dim - self.rotated
        q = x
        for part in self.to_queries:
            q = getattr(self, part)(q)
        q = q.unflatten(-1, (-1, self.head_dim))  # [B, T, heads, D]
        narrow, turned = self.kv_a_proj(x).split((self.kv_a_proj.out_features - self.rotated, self.rotated), -1)
        both = self.kv_b_proj(self.kv_a_norm(narrow)).unflatten(-1, (-1, plain + self.value_dim))
        k, v = both.split((plain, self.value_dim), -1)
        turned = self._rotated(turned[:, :, None], rope).expand(-1, -1, k.shape[2], -1)
        q = torch.cat((q[..., :plain], self._rotated(q[..., plain:], rope)), -1)
        k = torch.cat((k, turned), -1)
        return self.o_proj(attend(self, q, k, v).flatten(-2))

    def _rotated(self, x: Tensor, rope: Table) -> Tensor:
        """Rotate x [B, T, heads, rotated]; dimensions that lie in pairs are laid out in halves."""
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self.kernels.rotate(x, rope)
