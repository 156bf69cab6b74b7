"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-rotated layout of Hugging Face checkpoints.

Tables are made in fp32 from the positions. Beyond the length of pre-training the frequencies are stretched: all of them
(linear), the slow ones (Llama 3), or along a ramp between few and many turns (YaRN, Peng et al., 2023).
"""

import math

import torch
from torch import Tensor

from ptf.model.config import Rope

# cosines, and sines whose first half is negative; with `query_growth`, the factors of the queries, too
Table = tuple[Tensor, ...]


def frequencies(rope: Rope, dim: int, device: torch.device | None = None) -> Tensor:
    """Return the radians a position of each pair of dimensions, [dim / 2], fp32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if rope.kind == "default":
        return plain
    slow = plain / rope.factor
    if rope.kind == "linear":
        return slow
    if rope.kind == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)  # over the length of pre-training
        share = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    else:

        def dimension(turns):
            # the dimension whose frequency makes so many turns over the length of pre-training
            return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        first, last = dimension(rope.high), dimension(rope.low)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001
        share = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device=device) - first) / (last - first)).clamp(0, 1)
    return slow * (1 - share) + plain * share


def rotary(positions: Tensor, dim: int, rope: Rope) -> Table:
    """Return the cosines and sines of the positions for heads of `dim`: [B, T] → two of [B, T, 1, rotated], fp32.

    The first half of the sines is negative: it belongs to the second half of the dimensions, which `rotate` moves.

    With `query_growth` there is a third tensor, the factors of the queries [B, T, 1, 1].
    """
    angles = positions[..., None].float() * frequencies(rope, int(dim * rope.partial), positions.device)
    angles = angles[:, :, None]
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    if rope.scale != 1.0:
        cos, sin = cos * rope.scale, sin * rope.scale
    if not rope.query_growth:
        return cos, sin
    lengths = (positions // rope.original_positions)[..., None, None]
    return cos, sin, 1 + rope.query_growth * lengths.float().log1p()


def rotate(x: Tensor, table: Table) -> Tensor:
    """Apply the rotation to queries or keys, [B, T, heads, dim]; dimensions beyond the table's are not rotated."""
    cos, sin = (t.to(x.dtype) for t in table[:2])
    if not cos.shape[-1]:
        return x
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
