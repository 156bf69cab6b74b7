"""NF4 (Dettmers et al. 2023): blocks of 64 values along a row share a scale in fp32, and each value is one of 16
quantiles of the normal distribution; 4.5 bits for each value.

bitsandbytes converts, so that its 4-bit models and ours have the same values.
"""

import torch
from torch import Tensor

from ptf.model.bitsandbytes_functions import bitsandbytes_functions

KEY = "model.quantization: nf4"
BLOCK = 64  # values that share a scale
SCALE_BYTES = 4


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [.., in / 2] and the scales [.., in / 16] of a weight [.., in], both as bytes."""
    *outer, width = weight.shape
    codes, state = bitsandbytes_functions(KEY).quantize_4bit(
        weight.contiguous().view(-1, width), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
    )
    return codes.view(*outer, width // 2), state.absmax.view(torch.uint8).view(*outer, width // BLOCK * SCALE_BYTES)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [.., in] of these codes and scales; value times scale is rounded once, to `dtype`."""
    *outer, half = codes.shape
    functions, rows = bitsandbytes_functions(KEY), codes.numel() // half
    state = functions.QuantState(
        absmax=scales.reshape(-1).view(torch.float32),
        shape=torch.Size((rows, 2 * half)),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    return functions.dequantize_4bit(codes.reshape(-1, 1), state).view(*outer, 2 * half)
