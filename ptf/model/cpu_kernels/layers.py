"""Norms, gates and rotations by layers.cpp, and gradients of projections' weights by products.cpp.

Each is a function of ptf's model (layers.py, rope.py, matrix_product.py) with the same arguments; what the kernels do
not compute, the latter does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version

from ptf.model.attention import Attention
from ptf.model.cpu_kernels.library import library, run, takes
from ptf.model.latent_attention import LatentAttention
from ptf.model.layers import MLP, Linear, RMSNorm, gated, normalised
from ptf.model.matrix_product import differentiable_once
from ptf.model.matrix_product import linear as product
from ptf.model.rope import Table, rotate

PARTS = 32  # ranges of rows that the gradient of a norm's weight is summed over, whatever the number of threads


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        inverse = torch.empty(rows, dtype=torch.float32)
        run("norm", x, weight := weight.contiguous(), out, inverse, rows, x.shape[-1], eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dx, of_weight = torch.empty_like(x), torch.empty(PARTS, x.shape[-1], dtype=torch.float32)
        sizes = len(inverse), x.shape[-1], PARTS
        run("norm_backward", x, weight, inverse, grads[0].contiguous(), dx, of_weight, *sizes)
        return dx, of_weight[0].to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def norm(x: Tensor, weight: Tensor, eps: float, offset: bool, otherwise: Callable[..., Tensor] = normalised) -> Tensor:
    """Compute `ptf.model.layers.normalised`."""
    plain = not offset and weight.shape == x.shape[-1:] and takes(x, weight)
    if not plain or x.shape[-1] % library().width:
        return otherwise(x, weight, eps, offset)
    return _Norm.apply(x, weight, float(eps))


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor) -> Tensor:
        x, up = x.contiguous(), up.contiguous()
        if up.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            up = up.clone()  # the backward pass writes over both
        out = torch.empty_like(x)
        run("gate", x, up, out, x.numel())
        ctx.save_for_backward(x, up)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, up = ctx.saved_tensors  # the gradients are written over them, in place of as much fresh memory
        run("gate_backward", x, up, grads[0].contiguous(), x.numel())
        increment_version((x, up))  # so that a second backward raises
        return x, up


def gate(
    activate: Callable[[Tensor], Tensor], x: Tensor, up: Tensor, otherwise: Callable[..., Tensor] = gated
) -> Tensor:
    """Compute `ptf.model.layers.gated`."""
    plain = activate is F.silu and x.shape == up.shape and takes(x, up)
    if not plain or x.shape[-1] % library().width:
        return otherwise(activate, x, up)
    return _Gate.apply(x, up)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, 0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return _turned(grads[0], cosines, sines, 1), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, back: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    *_, heads, dim = x.shape
    run("rotate", x, cosines, sines, out, x.numel() // (heads * dim), heads, dim, cosines.shape[-1], back)
    return out


def rotation(x: Tensor, table: Table, otherwise: Callable[..., Tensor] = rotate) -> Tensor:
    """Compute `ptf.model.rope.rotate`."""
    half, odd = divmod(table[0].shape[-1], 2)
    a_row_each = all(t.shape[:-1] == (*x.shape[:-2], 1) for t in table[:2])
    if odd or not half or half % library().width or not a_row_each or not takes(x):
        return otherwise(x, table)
    cosines, sines = (t.to(x.dtype).contiguous() for t in table[:2])
    return _Rotation.apply(x, cosines, sines)


class _PairedLinear(Function):
    """x · weightᵀ + bias, and the gradient of the weight by products.cpp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return F.linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        return (
            grad @ weight if of_x else None,
            gradient_of_weight(rows, x.reshape(-1, x.shape[-1]).contiguous()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Return gradᵀ · x [out, in] of contiguous matrices in bf16, grad [n, out] and x [n, in], by products.cpp, where
    the library `multiplies_pairs` and `out` and `in` are multiples of two registers."""
    out = grad.new_empty(grad.shape[1], x.shape[1])
    library().call("transposed_product", grad, x, out, len(grad), *out.shape, torch.get_num_threads())
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, otherwise: Callable[..., Tensor] = product) -> Tensor:
    """Compute `ptf.model.matrix_product.linear`."""
    trains = weight.requires_grad and torch.is_grad_enabled() and x.numel() > 0
    plain = trains and x.dtype == torch.bfloat16 and takes(x, weight) and (bias is None or takes(x, bias))
    if not plain or not (kernels := library()).multiplies_pairs or any(n % (2 * kernels.width) for n in weight.shape):
        return otherwise(x, weight, bias)
    return _PairedLinear.apply(x, weight, bias)


def use(model: nn.Module) -> None:
    """Let a decoder compute its norms, gates, rotations and the gradients of its weights by the kernels, and what they
    leave out as before."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.compute = partial(linear, otherwise=module.compute)  # type: ignore[method-assign]
        elif isinstance(module, RMSNorm):
            module.compute = partial(norm, otherwise=module.compute)  # type: ignore[method-assign]
        elif isinstance(module, MLP):
            module.compute = partial(gate, otherwise=module.compute)  # type: ignore[method-assign]
        elif isinstance(module, Attention | LatentAttention):
            module.rotate = partial(rotation, otherwise=module.rotate)  # type: ignore[method-assign]
