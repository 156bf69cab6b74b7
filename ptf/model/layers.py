"""The parts every decoder shares: the one place where a projection is made, RMSNorm, the gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.model.config import DecoderConfig


def linear(d_in: int, d_out: int, bias: bool = False) -> nn.Linear:
    """The only way a projection is made."""
    return nn.Linear(d_in, d_out, bias=bias)


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019; normalised in fp32, scaled in the model's type, as the checkpoints were trained."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = linear(c.dim, c.hidden)
        self.up_proj = linear(c.dim, c.hidden)
        self.down_proj = linear(c.hidden, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
