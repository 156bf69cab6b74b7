"""Components as a user would write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.attention import Attention
from ptf.model.chunked import cross_entropy
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.kernels.attention import Attend
from ptf.model.layers import MLP, LayerFactory
from ptf.model.moe import MixtureOfExperts
from ptf.model.rope import Table


class SameMLP(nn.Module):
    """The gated MLP written in another way: it has the same tensors and computes the same function."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str) -> None:
        super().__init__()
        for name, (into, out) in {
            "gate": (c.dim, c.intermediate_size),
            "up": (c.dim, c.intermediate_size),
            "down": (c.intermediate_size, c.dim),
        }.items():
            setattr(self, f"{name}_proj", factory.linear(f"{path}.{name}_proj", into, out, c.mlp_bias))
        self.act = F.silu if c.activation == "silu" else lambda x: F.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class ScaledMLP(MLP):
    """The MLP with one more tensor, whose initial value is `scale`."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str, scale: float = 1.0) -> None:
        super().__init__(c, factory, path)
        self.scale = Parameter(torch.full((c.dim,), scale))
        self.register_buffer("shift", torch.full((c.dim,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class NarrowMLP(nn.Module):
    """An MLP of two projections through `width`, with names and shapes of its own."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str, width: int = 24) -> None:
        super().__init__()
        self.into = factory.linear(f"{path}.into", c.dim, width)
        self.out = factory.linear(f"{path}.out", width, c.dim)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return self.out(F.relu(self.into(x)))


class GatedAttention(Attention):
    """Attention whose output is multiplied by a gate, which is open at first."""

    def __init__(self, c: DecoderConfig, layer: int, factory: LayerFactory, path: str) -> None:
        super().__init__(c, layer, factory, path)
        self.gate = Parameter(torch.ones(c.dim))

    def forward(self, x: Tensor, rope: Table, attend: Attend) -> Tensor:
        return super().forward(x, rope, attend) * self.gate


class SameMoE(MixtureOfExperts):
    """The built-in mixture of experts, under another name."""


class DeepHead(nn.Module):
    """A head with a layer before the vocabulary and a loss of its own: cross-entropy with a bias."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str, width: int = 32) -> None:
        super().__init__()
        self.vocab = c.vocab
        self.into = factory.linear(f"{path}.into", c.dim, width)
        self.out = factory.linear(f"{path}.out", width, c.vocab, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.into(x)))

    def loss(self, x: Tensor, batch) -> Tensor:
        return cross_entropy(
            F.silu(self.into(x)),
            Head(self.out.weight, self.vocab, bias=self.out.bias),
            batch.targets,
            batch.loss_weights,
        )
