"""MXFP4 (OCP Microscaling Formats, 2023): blocks of 32 values of 4 bits (1 sign, 2 exponent, 1 mantissa) share a power
of two, one byte; 4.25 bits for each value. Published GPT-OSS checkpoints store their experts so.

A byte of codes has two values, the low half first; a byte of scales is an exponent plus 127.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.errors import UserError

BLOCK = 32  # values that share a scale
SCALE_BYTES = 1
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# values that are converted at a time: conversion has intermediate tensors of four bytes a value
CHUNK = 1 << 24


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [.., in / 2] and the scales [.., in / 32] of a weight [.., in] whose values MXFP4 holds exactly.

    A block's scale is the least with which its largest value can be written, whatever the checkpoint's was. Raises
    UserError for a weight with other values.
    """
    *outer, width = weight.shape
    parts = [_quantise_rows(part) for part in weight.reshape(-1, width).split(max(1, CHUNK // width))]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes.view(*outer, width // 2), scales.view(*outer, width // BLOCK)


def _quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    blocks = rows.float().view(len(rows), -1, BLOCK)
    # the largest value becomes 4 or 6; 0 has the exponent 0
    exponents = (torch.frexp(blocks.abs().amax(-1)).exponent - 3).clamp(min=-BIAS)
    values = torch.ldexp(blocks, -exponents[..., None])
    magnitudes = torch.tensor(MAGNITUDES, device=rows.device)
    index = torch.bucketize(values.abs(), magnitudes, out_int32=True).clamp(max=len(MAGNITUDES) - 1)
    if not torch.equal(magnitudes[index], values.abs()):
        raise UserError(
            "model.quantization: mxfp4 keeps weights that a checkpoint stores in MXFP4, and this one has other values; "
            "set model.quantization: nf4, which rounds them"
        )
    halves = (index + 8 * values.signbit()).to(torch.uint8).view(len(rows), -1, 2)
    return halves[..., 0] | halves[..., 1] << 4, (exponents + BIAS).to(torch.uint8)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [.., in] of these codes and scales, exactly."""
    *outer, half = codes.shape
    step = max(1, CHUNK // (2 * half))
    pairs = _pairs(codes.device, dtype)
    weight = torch.empty(codes.numel() // half, 2 * half // BLOCK, BLOCK, dtype=dtype, device=codes.device)
    rows, exponents = codes.reshape(-1, half), scales.reshape(len(weight), -1)
    for out, part, powers in zip(weight.split(step), rows.split(step), exponents.split(step), strict=True):
        values = F.embedding(part.int(), pairs).view(out.shape)
        scale = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers.int() - BIAS).to(dtype)
        torch.mul(values, scale[..., None], out=out)
    return weight.view(*outer, 2 * half)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two values of every byte of codes, [256, 2]; computed on the device, which then waits for no copy."""
    codes = torch.arange(16, device=device)
    mantissa, exponent = codes & 1, codes >> 1 & 3
    normal = torch.ldexp(1 + mantissa / 2, exponent - 1)
    values = torch.where(exponent == 0, mantissa / 2, normal) * torch.where(codes < 8, 1.0, -1.0)
    every = torch.arange(256, device=device)
    return torch.stack((values[every & 15], values[every >> 4]), -1).to(dtype)
