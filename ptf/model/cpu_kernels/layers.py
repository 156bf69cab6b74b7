"""Norms, gates and rotations by layers.cpp. Each is a function of ptf's model (layers.py, rope.py) with the same
arguments; what the kernels do not compute, the latter does."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ptf.model.attention import Attention
from ptf.model.cpu_kernels.library import library
from ptf.model.latent_attention import LatentAttention
from ptf.model.layers import MLP, RMSNorm, gated, normalised
from ptf.model.matrix_product import differentiable_once
from ptf.model.rope import Table, rotate

PARTS = 32  # ranges of rows that the gradient of a norm's weight is summed over, whatever the number of threads
NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels compute with these tensors: of one dtype that they know, plain and on a CPU."""
    x = tensors[0]
    return x.dtype in NAMES and all(
        t.dtype == x.dtype and t.device.type == "cpu" and type(t) in (Tensor, Parameter) for t in tensors
    )


def run(name: str, x: Tensor, *arguments: Tensor | int | float) -> None:
    """Call a kernel for the dtype of x; tensors are made contiguous."""
    library().call(f"{name}_{NAMES[x.dtype]}", x, *arguments, torch.get_num_threads())


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        inverse = torch.empty(rows)
        run("norm", x, weight, out, inverse, rows, x.shape[-1], eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dx, of_weight = torch.empty_like(x), torch.empty(PARTS, x.shape[-1])
        sizes = len(inverse), x.shape[-1], PARTS
        run("norm_backward", x, weight, inverse, grads[0].contiguous(), dx, of_weight, *sizes)
        return dx, of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """Compute `ptf.model.layers.normalised`."""
    if offset or x.shape[-1] % library().width or not takes(x, weight):
        return normalised(x, weight, eps, offset)
    return _Norm.apply(x, weight, float(eps))


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor) -> Tensor:
        x, up = x.contiguous(), up.contiguous()
        out = torch.empty_like(x)
        run("gate", x, up, out, x.numel())
        ctx.save_for_backward(x, up)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, up = ctx.saved_tensors  # the gradients are written over them: fresh memory takes as long again
        run("gate_backward", x, up, grads[0].contiguous(), x.numel())
        increment_version((x, up))  # so that a second backward raises
        return x, up


def gate(activate: Callable[[Tensor], Tensor], x: Tensor, up: Tensor) -> Tensor:
    """Compute `ptf.model.layers.gated`."""
    if activate is not F.silu or x.numel() % library().width or not takes(x, up):
        return gated(activate, x, up)
    return _Gate.apply(x, up)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, 0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(grads[0], *ctx.saved_tensors, 1), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, back: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    *_, heads, dim = x.shape
    run("rotate", x, cosines, sines, out, x.numel() // (heads * dim), heads, dim, cosines.shape[-1], back)
    return out


def rotation(x: Tensor, table: Table) -> Tensor:
    """Compute `ptf.model.rope.rotate`."""
    half, odd = divmod(table[0].shape[-1], 2)
    if odd or not half or half % library().width or not takes(x):
        return rotate(x, table)
    cosines, sines = (t.to(x.dtype).contiguous() for t in table[:2])
    return _Rotation.apply(x, cosines, sines)


def use(model: nn.Module) -> None:
    """Let a decoder compute its norms, gates and rotations by the kernels."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.compute = norm  # type: ignore[method-assign]
        elif isinstance(module, MLP):
            module.compute = gate  # type: ignore[method-assign]
        elif isinstance(module, Attention | LatentAttention):
            module.rotate = rotation  # type: ignore[method-assign]
