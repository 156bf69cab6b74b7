"""The parts every decoder shares: the one place where a projection is made, RMSNorm, the gated MLP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import Activation, DecoderConfig
from ptf.model.lora import Lora, LoraLinear


@dataclass(frozen=True, slots=True)
class Parts:
    """How the parts of a decoder are made, by unified name (`layers.3.attn.q_proj`).

    `replace`: pattern (`layers.*.mlp`) → what to call instead of the class that stands there, with the same arguments.
    `lora`: the adapters that projections get, if any.
    """

    replace: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    own: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)  # what was replaced so far, by path: makes it once more
    lora: Lora | None = None

    def linear(self, path: str, d_in: int, d_out: int, bias: bool = False) -> nn.Linear:
        """The only way a projection is made: plain, or with an adapter."""
        if self.lora is not None and self.lora.adapts(path):
            return LoraLinear(d_in, d_out, bias, self.lora)
        return nn.Linear(d_in, d_out, bias=bias)

    def component(self, path: str, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
        """An attention, MLP, mixture of experts or head: `kind`, or what replaces it."""
        pattern = self.pattern(path)
        if pattern is None:
            return kind(*args)
        self.own[path] = partial(self.replace[pattern], *args)
        return self.own[path]()

    def pattern(self, path: str) -> str | None:
        """The first pattern of `replace` that this path matches."""
        return next((pattern for pattern in self.replace if fnmatchcase(path, pattern)), None)


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    return F.silu if name == "silu" else gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def normalised(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = F.rms_norm(x.to(wide), x.shape[-1:], eps=eps)
    if offset:
        return (normal * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * normal.to(x.dtype)


def gated(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activate(gate) * up


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019; normalised in fp32, scaled in the model's type, as the checkpoints were trained. With `offset` (Gemma) the scale is
    1 + weight, in fp32."""

    def __init__(self, dim: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(dim) if offset else torch.ones(dim))
        self.eps, self.offset = eps, offset

    compute = staticmethod(normalised)  # or the same, compiled (plan.py)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.eps, self.offset)


class MLP(nn.Module):
    """Gated (Shazeer 2020): down(act(gate(x)) · up(x))."""

    def __init__(self, c: DecoderConfig, parts: Parts, path: str) -> None:
        super().__init__()
        self.gate_proj = parts.linear(f"{path}.gate_proj", c.dim, c.hidden, c.mlp_bias)
        self.up_proj = parts.linear(f"{path}.up_proj", c.dim, c.hidden, c.mlp_bias)
        self.down_proj = parts.linear(f"{path}.down_proj", c.hidden, c.dim, c.mlp_bias)
        self.activation = activation(c.activation)

    compute = staticmethod(gated)  # or the same, compiled (plan.py)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.compute(self.activation, self.gate_proj(x), self.up_proj(x)))
