"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-rotated layout of Hugging Face checkpoints; tables are made in fp32 from the positions."""

import torch
from torch import Tensor


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines: [B, T] → two of [B, T, 1, dim], fp32."""
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)  # [dim / 2]
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply to queries or keys, [B, T, heads, dim]."""
    cos, sin = (t.to(x.dtype) for t in table)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin
