"""The parts that every decoder shares: the one place where a projection is constructed, RMSNorm, and the gated MLP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.kernels.elementwise import ACTIVATIONS
from ptf.model.lora import Linear, Lora
from ptf.model.quantised_weights import quantise_weight


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """Constructs the parts of a decoder, by unified name (`layers.3.attn.q_proj`).

    `replace` maps a pattern (`layers.*.mlp`) to what is called instead of the built-in class, with the same arguments.
    `lora` describes the adapters that projections get, if any.
    """

    replace: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    # path of each component that was replaced → a function that constructs it again
    constructors: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)
    lora: Lora | None = None
    # the form of four bits in which a weight of this unified name is held (quantised_weights.py), if any
    quantised: Callable[[str], str | None] | None = None
    kernels: Kernels = PLAIN  # what the parts compute with

    def linear(self, path: str, d_in: int, d_out: int, bias: bool = False) -> Linear:
        """Construct a projection, plain or with an adapter. Every projection of a decoder is made here."""
        linear = Linear(d_in, d_out, bias, self.lora if self.lora and self.lora.adapts(path) else None, self.kernels)
        self.quantise_weight(linear, "weight", f"{path}.weight")
        return linear

    def quantise_weight(self, module: nn.Module, weight: str, name: str) -> None:
        """Hold a weight of a module in four bits, if the weight of this unified name is to be held so."""
        if self.quantised is not None and (form := self.quantised(name)):
            quantise_weight(module, weight, name, form)

    def component(self, path: str, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
        """Construct an attention, MLP, mixture of experts or head: `kind`, or what replaces it at this path."""
        pattern = self.pattern(path)
        if pattern is None:
            return kind(*args)
        self.constructors[path] = partial(self.replace[pattern], *args)
        return self.constructors[path]()

    def pattern(self, path: str) -> str | None:
        """Return the first pattern of `replace` that this path matches, or None."""
        return next((pattern for pattern in self.replace if fnmatchcase(path, pattern)), None)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019).

    It normalises in fp32 and scales in the model's dtype, as the checkpoints were trained. With `offset` (Gemma) the
    scale is 1 + weight, in fp32.
    """

    def __init__(self, dim: int, eps: float, offset: bool, kernels: Kernels) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(dim) if offset else torch.ones(dim))
        self.eps, self.offset, self.kernels = eps, offset, kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., dim], normalised and scaled."""
        return self.kernels.normalise(x, self.weight, self.eps, self.offset)


class MLP(nn.Module):
    """The gated MLP (Shazeer 2020): down(act(gate(x)) · up(x))."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str) -> None:
        super().__init__()
        self.gate_proj = factory.linear(f"{path}.gate_proj", c.dim, c.intermediate_size, c.mlp_bias)
        self.up_proj = factory.linear(f"{path}.up_proj", c.dim, c.intermediate_size, c.mlp_bias)
        self.down_proj = factory.linear(f"{path}.down_proj", c.intermediate_size, c.dim, c.mlp_bias)
        self.activation, self.kernels = ACTIVATIONS[c.activation], factory.kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [.., dim] for x [.., dim]."""
        return self.down_proj(self.kernels.gate(self.activation, self.gate_proj(x), self.up_proj(x)))
