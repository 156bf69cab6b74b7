"""Grouped-query attention: the projections, which are the same everywhere. How tokens attend is given by an `Attend`
(kernels/attention.py)."""

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig
from ptf.model.kernels.attention import Attend
from ptf.model.layers import LayerFactory, RMSNorm
from ptf.model.rope import Table


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions; the way tokens attend is given by an
    `Attend`."""

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
