"""What lies between the products of matrices: norms and gates, in PyTorch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.model.config import Activation

SWISH = 1.702  # GPT-OSS: gate · sigmoid(1.702 gate)


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """Return the activation function of this name."""
    return F.silu if name == "silu" else gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def normalised(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """Normalise in fp32 and scale by `weight`, in the dtype of x; with `offset`, scale by 1 + weight in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = F.rms_norm(x.to(wide), x.shape[-1:], eps=eps)
    if offset:
        return (normal * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * normal.to(x.dtype)


def gated(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up."""
    return activate(gate) * up


def clamped(clamp: float, gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gate of GPT-OSS: (up + 1) · gate · sigmoid(1.702 gate), of values that are clamped first."""
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (up + 1) * (gate * torch.sigmoid(SWISH * gate))
