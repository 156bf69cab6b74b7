"""Gated DeltaNet: linear attention by the gated delta rule, in place of softmax attention (Qwen3-Next, Qwen3.5).

Queries, keys and values pass a short causal convolution first; the output passes a norm and a gate for each head. What
goes from token to token, the convolution's last inputs and the state of the rule, is held by the `Attend` object, as
keys and values of softmax attention are: nothing in training, a cache in generation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig
from ptf.model.kernels.attention import Attend
from ptf.model.kernels.elementwise import normalised
from ptf.model.layers import LayerFactory
from ptf.model.rope import Table

NORM_EPS = 1e-6  # under the root of the length by which queries and keys are divided


class GatedDeltaNet(nn.Module):
    """A layer of linear attention with `key_heads` heads of queries and keys, and `value_heads` heads of values.

    The projections are those of the checkpoints, which have queries, keys, values and gate in one matrix or two; with
    `fused`, the rows of one matrix are grouped by key head.
    """

    def __init__(self, c: DecoderConfig, layer: int, factory: LayerFactory, path: str) -> None:
        super().__init__()
        assert c.delta is not None
        self.layer, self.config, self.kernels = layer, c.delta, factory.kernels
        keys, values = c.delta.key_heads * c.delta.key_dim, c.delta.value_heads * c.delta.value_dim
        widths = (
            {"qkvz": 2 * keys + 2 * values, "ba": 2 * c.delta.value_heads}
            if c.delta.fused
            else {"qkv": 2 * keys + values, "z": values, "b": c.delta.value_heads, "a": c.delta.value_heads}
        )
        for name, width in widths.items():
            self.add_module(f"{name}_proj", factory.linear(f"{path}.{name}_proj", c.dim, width))
        self.conv = Convolution(2 * keys + values, c.delta.conv)
        self.a_log = Parameter(torch.zeros(c.delta.value_heads))
        self.dt_bias = Parameter(torch.ones(c.delta.value_heads))
        self.norm = GatedNorm(c.delta.value_dim, c.norm_eps)
        self.out_proj = factory.linear(f"{path}.out_proj", values, c.dim)

    def forward(self, x: Tensor, rope: Table, attend: Attend) -> Tensor:
        """Return the output [B, T, D] for x [B, T, D]; positions are not rotated."""
        if self.config.fused:
            qkv, z, b, a = self._grouped(x)
        else:
            qkv, z, b, a = (self.get_submodule(f"{name}_proj")(x) for name in ("qkv", "z", "b", "a"))
        wide = torch.promote_types(x.dtype, torch.float32)
        decay = -self.a_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))  # [B, T, value_heads]
        out = attend.delta(self, qkv, decay, b.sigmoid())
        return self.out_proj(self.norm(out.to(x.dtype), z.unflatten(-1, (self.config.value_heads, -1))).flatten(-2))

    def _grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the input of the convolution, the gate, β before its sigmoid, and the decay's input, by token, of
        projections whose rows are grouped by key head."""
        c = self.config
        per_key = c.value_heads // c.key_heads  # heads of values of each key head
        each = (c.key_dim, c.key_dim, per_key * c.value_dim, per_key * c.value_dim)
        # [B, T, key_heads, ..]
        q, k, v, z = self.get_submodule("qkvz_proj")(x).unflatten(-1, (c.key_heads, -1)).split(each, -1)
        b, a = self.get_submodule("ba_proj")(x).unflatten(-1, (c.key_heads, -1)).split((per_key, per_key), -1)
        q, k, v, z, b, a = (t.flatten(-2) for t in (q, k, v, z, b, a))
        return torch.cat((q, k, v), -1), z, b, a

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [.., value_heads, key_dim] of length 1 (queries then scaled), and values
        [.., value_heads, value_dim], of what the convolution returned."""
        c = self.config
        keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        q, k, v = F.silu(qkv).split((keys, keys, values), -1)
        q, k = (t.unflatten(-1, (c.key_heads, -1)) for t in (q, k))
        q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for t in (q, k))
        if c.value_heads > c.key_heads:
            q, k = (t.repeat_interleave(c.value_heads // c.key_heads, -2) for t in (q, k))
        return q * c.key_dim**-0.5, k, v.unflatten(-1, (c.value_heads, -1))


class Convolution(nn.Module):
    """The weights of the convolution, [channels, 1, width], which `Attend.delta` applies."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(channels, 1, width))


class GatedNorm(nn.Module):
    """RMSNorm of each head's output, times silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [.., dim], normalised, scaled and gated; the gate is computed in fp32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (normalised(x, self.weight, self.eps, False) * F.silu(gate.to(wide))).to(x.dtype)
