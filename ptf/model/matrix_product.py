"""Products of fp32 matrices on a CPU: by oneDNN on AMD's CPUs with AVX-512, elsewhere by what torch takes (MKL).

On such CPUs oneDNN is faster than MKL (benchmarks/step_profile.py, also with PTF_MATRIX_PRODUCTS=torch). torch has it
built in, and calls it for 16 bits and where a model is compiled for inference.

The choice depends on the CPU and on the size of a product, never on a clock, so that a run repeats; what a run was made
with names it, and a run does not continue on a CPU that takes the other library unless
`checkpoint.accept_version_changes` permits it (ptf/compute/provenance.py). PTF_MATRIX_PRODUCTS, `torch` or `onednn`,
overrides the choice.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from ptf.errors import UserError
from ptf.model.cpu_kernels.library import loaded

VARIABLE = "PTF_MATRIX_PRODUCTS"
LIBRARIES = ("torch", "onednn")
LEAST = 1 << 22  # multiplications of a product that oneDNN computes: below, calling it saves little or nothing
BLOCK_BYTES = 4 << 20  # of a product that is added or copied to its place: the CPU's caches hold it
_left_to_torch = ContextVar("left_to_torch", default=False)
OPERATOR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


Backward = TypeVar("Backward")


def differentiable_once(backward: Backward) -> Backward:
    """Mark a `backward` whose result cannot be differentiated; unlike torch's own decorator, it keeps the type."""
    return cast("Backward", once_differentiable(cast("Any", backward)))


@functools.cache
def library() -> str:
    """Return the library of this process's products: `torch`, or `onednn`. Raises UserError if the variable names
    another one, or one that torch was built without."""
    asked = os.environ.get(VARIABLE)
    available = OPERATOR is not None and torch.backends.mkldnn.is_available()
    if asked is None:
        return "onednn" if available and has_fast_onednn() else "torch"
    if asked not in LIBRARIES:
        raise UserError(f"{VARIABLE} is {asked!r}; it may be {' or '.join(LIBRARIES)}")
    if asked == "onednn" and not available:
        raise UserError(f"{VARIABLE} is onednn, but torch was built without oneDNN: unset it")
    return asked


def has_fast_onednn(cpus: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is a CPU of AMD with AVX-512."""
    try:
        return "AuthenticAMD" in cpus.read_text() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    except OSError:
        return False


def record(device: torch.device, precision: str) -> dict[str, str]:
    """Return oneDNN with its version if it computes the products of a run on this device (`train.precision`), for the
    record of what the run was made with."""
    if library() != "onednn" or device.type != "cpu" or precision != "fp32":
        return {}
    version = re.search(r"MKL-DNN (v[\d.]+)", torch.__config__.show())
    return {"oneDNN": version[1] if version else "built in"}


def is_taken(x: Tensor, rows: int, weight: Tensor) -> bool:
    """Return whether oneDNN computes the product of so many rows with a weight [out, in]."""
    return (
        rows * weight.numel() >= LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) in (Tensor, Parameter)  # neither distributed nor fake
        and type(weight) in (Tensor, Parameter)
        and library() == "onednn"
        and not _left_to_torch.get()
    )


@contextlib.contextmanager
def left_to_torch() -> Iterator[None]:
    """Leave all products to torch, where two definitions of a model are compared, and not two libraries."""
    before = _left_to_torch.set(True)
    try:
        yield
    finally:
        _left_to_torch.reset(before)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, [.., out] for x [.., in] and weight [out, in]; it can be differentiated once."""
    if weight.dim() != 2 or not is_taken(x, math.prod(x.shape[:-1]), weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def write_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write x · weightᵀ [rows, n] to `out`, for x [rows, k] and weight [n, k], without gradients."""
    if not is_taken(x, len(x), weight):
        return torch.mm(x, weight.t(), out=out)
    for block in blocks(len(x), len(weight)):
        out[:, block] = _product(x, weight[block])
    return out


def add_product(total: Tensor, x: Tensor, weight: Tensor, *, first: bool = False) -> None:
    """Add xᵀ · weight [k, n] to `total`, for x [rows, k] and weight [rows, n], without gradients; the `first` product
    is written over it."""
    if not is_taken(x, x.shape[1], weight):
        total.addmm_(x.t(), weight, beta=int(not first))
        return
    columns = weight.t()
    for block in blocks(weight.shape[1], x.shape[1]):
        if first:
            total[block] = _product(x[:, block].t(), columns)
        else:
            total[block] += _product(x[:, block].t(), columns)


def blocks(rows: int, columns: int) -> list[slice]:
    """Return blocks of the columns of a product, of BLOCK_BYTES each, or 64 columns."""
    size = max(64, BLOCK_BYTES // (4 * rows))
    return [slice(i, min(i + size, columns)) for i in range(0, columns, size)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):  # for which oneDNN has no fast kernel
        weight = weight.contiguous()
    return OPERATOR(_in_rows(x), weight, bias, "none", [], "")


def _in_rows(x: Tensor) -> Tensor:
    """Return a transposed matrix laid out in rows by ptf's kernels, if they are in use; otherwise as it is, for the
    operator to do the same. The bits are the same."""
    kernels = loaded() if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous() else None
    if kernels is None:
        return x
    out = torch.empty(x.shape, dtype=torch.float32)
    kernels.call("transpose", x.t(), out, x.shape[1], x.shape[0], torch.get_num_threads())
    return out


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ · b [n, k], for a [rows, n] and b [rows, k]. The operator copies its first matrix into rows,
    so that is the smaller of both."""
    return _product(a.t(), b.t()) if a.shape[1] <= b.shape[1] else _product(b.t(), a.t()).t()


class _Linear(Function):
    """x · weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.shape = x.shape
        return _product(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            _product(rows, weight.t()).view(ctx.shape) if of_x else None,
            _transposed_product(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


if OPERATOR is not None:

    @register_flop_formula(OPERATOR)
    def _flops(x_shape: Any, weight_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        """Count a product as torch counts aten.mm."""
        return 2 * math.prod(x_shape[:-1]) * weight_shape[0] * weight_shape[1]
