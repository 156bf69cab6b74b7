"""Products of fp32 matrices on a CPU: by oneDNN on AMD's CPUs with AVX-512, elsewhere by what torch takes (MKL).

There MKL is the slower one, and a step is products for the most part. torch has oneDNN built in, and calls it for 16
bits.

The choice depends on the CPU and on the size of a product, never on a clock, so that a run repeats. What a run was made
with names it (`record`).
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

OPERATOR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
LEAST = 1 << 22  # multiplications of a product that oneDNN computes: below, calling it saves little or nothing
BLOCK_BYTES = 4 << 20  # of a product that is added or copied to its place: the CPU's caches hold it


@functools.cache
def is_faster(cpus: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether oneDNN is there and computes faster than MKL: on a CPU of AMD with AVX-512."""
    if OPERATOR is None or not torch.backends.mkldnn.is_available():
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and cpus.exists() and "AuthenticAMD" in cpus.read_text()


def record(device: torch.device, precision: str) -> dict[str, str]:
    """Return oneDNN with its version if it computes products of `train.precision` on this device, else nothing."""
    if device.type != "cpu" or precision != "fp32" or not is_faster():
        return {}
    version = re.search(r"MKL-DNN (v[\d.]+)", torch.__config__.show())
    return {"oneDNN": version[1] if version else "built in"}


def is_taken(x: Tensor, rows: int, weight: Tensor) -> bool:
    """Return whether oneDNN computes the product of so many rows with a weight."""
    return (
        rows * weight.numel() >= LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) in (Tensor, Parameter)  # neither distributed nor fake
        and type(weight) in (Tensor, Parameter)
        and is_faster()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, [.., out] for x [.., in] and weight [out, in]; oneDNN's is differentiable once."""
    if weight.dim() != 2 or not is_taken(x, math.prod(x.shape[:-1]), weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write a · b [n, m] to `out`, or add it, without gradients. oneDNN can do neither: it gets blocks of the longer
    side."""
    if not is_taken(a, len(a), b):
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
        return
    wide, size = out.shape[1] > len(out), max(64, BLOCK_BYTES // (4 * min(out.shape)))
    for start in range(0, max(out.shape), size):
        block = slice(start, start + size)
        place = out[:, block] if wide else out[block]
        product = _product(a, b[:, block].t()) if wide else _product(a[block], b.t())
        if add:
            place += product
        else:
            place.copy_(product)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):  # for which oneDNN has no fast kernel
        weight = weight.contiguous()
    return OPERATOR(x, weight, bias, "none", [], "")


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ · b [n, k], for a [rows, n] and b [rows, k]. The operator copies its first matrix into rows,
    so that is the smaller of both."""
    return _product(a.t(), b.t()) if a.shape[1] <= b.shape[1] else _product(b.t(), a.t()).t()


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.shape = x.shape
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            _product(rows, weight.t()).view(ctx.shape) if of_x else None,
            _transposed_product(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
