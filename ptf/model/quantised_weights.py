"""Weights that do not train, held in four bits, and their products with activations.

A weight `NAME` [.., out, in] becomes two parameters of bytes, which FSDP shards and gathers as they are: `NAME_codes`
[.., out, in / 2] has two values in each byte, `NAME_scales` [.., out, n] the bytes of the scales of its blocks. A
weight is dequantised for a product, and again for the product of its backward pass; between the two, nothing but its
bytes is held. There are two forms: NF4 rounds any weight (`nf4.py`), MXFP4 holds exactly what a checkpoint stores so
(`mxfp4.py`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ptf.errors import UserError
from ptf.model import mxfp4, nf4
from ptf.model.checkpoint_mapping import Slices
from ptf.model.sharded_tensor import fill

FORMS = {"nf4": nf4, "mxfp4": mxfp4}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The names of a quantised weight's parameters, the shape of the weight itself, and its form."""

    codes: str
    scales: str
    shape: torch.Size
    form: str  # of `FORMS`


def quantise_weight(module: Any, weight: str, name: str, form: str) -> None:
    """Replace a parameter of a module by codes and scales, which have no values yet; `name` is its unified name.

    Raises UserError if its rows are not made of whole blocks.
    """
    shape, block = getattr(module, weight).shape, FORMS[form].BLOCK
    if shape[-1] % block:
        raise UserError(f"model.quantization: the rows of {name} have {shape[-1]} values, not a multiple of {block}")
    delattr(module, weight)
    for part, width in (("codes", shape[-1] // 2), ("scales", shape[-1] // block * FORMS[form].SCALE_BYTES)):
        module.register_parameter(
            f"{weight}_{part}", Parameter(torch.zeros(*shape[:-1], width, dtype=torch.uint8), requires_grad=False)
        )
    module.quantised[weight] = QuantisedWeight(f"{weight}_codes", f"{weight}_scales", shape, form)


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """Return the quantised weights of a model by the unified name of the weight; its parts have unified names, too."""
    return {
        f"{path}.{weight}": replace(of, codes=f"{path}.{of.codes}", scales=f"{path}.{of.scales}")
        for path, module in model.named_modules()
        for weight, of in getattr(module, "quantised", {}).items()
    }


def weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's weights by unified name; a quantised weight counts as one, not as two."""
    quantised = quantised_weights(model)
    parts = {name: weight for weight, of in quantised.items() for name in (of.codes, of.scales)}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        weight = parts.get(name, name)
        shapes[weight] = quantised[weight].shape if weight in quantised else parameter.shape
    return shapes


def fill_quantised(weight: QuantisedWeight, codes: Tensor, scales: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Fill the parts of a quantised weight with what `read` returns for whole rows of the weight.

    A process quantises only the rows of which it owns a part, once where both parts are sharded alike.
    """
    last: tuple[Slices, tuple[Tensor, Tensor]] = ((), (codes, scales))

    def part_of(which: int, part: Slices) -> Tensor:
        nonlocal last
        rows = part[:-1]
        if rows != last[0]:
            whole = read((*rows, slice(0, 2 * codes.shape[-1])))
            last = (rows, FORMS[weight.form].quantise(whole.to(codes.device, torch.float32)))
        return last[1][which][..., part[-1]]

    fill(codes, functools.partial(part_of, 0))
    fill(scales, functools.partial(part_of, 1))


def quantised_linear(module: Any, x: Tensor) -> Tensor:
    """Return the projection [.., out] of x [.., in] by a module's quantised weight, and its bias."""
    bias, linear = module.bias, module.kernels.linear
    if bias is not None and bias.requires_grad:
        return _Product.apply(x, *_parts(module, "weight"), linear, torch.matmul) + bias
    product = functools.partial(linear, bias=bias)  # which rounds once, as without packing
    return _Product.apply(x, *_parts(module, "weight"), product, torch.matmul)


def grouped_linear(module: Any, weight: str, x: Tensor, ends: Tensor) -> Tensor:
    """Return the product [n, out] of each row of x [n, in] with its expert's matrix in a stacked weight.

    The weight may be quantised. `ends` [experts] is the end of each expert's rows.
    """
    if weight not in module.quantised:
        return F.grouped_mm(x, getattr(module, weight).transpose(-2, -1), offs=ends)

    def forward(rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)

    def backward(grad: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(grad, matrices, offs=ends)

    return _Product.apply(x, *_parts(module, weight), forward, backward)


def _parts(module: Any, weight: str) -> tuple[Tensor, Tensor, str]:
    of = module.quantised[weight]
    return getattr(module, of.codes), getattr(module, of.scales), of.form


class _Product(Function):
    """A product of activations with a quantised weight, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        form: str,
        product: Callable[[Tensor, Tensor], Tensor],
        of_gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form, ctx.of_gradient = form, of_gradient
        return product(x, FORMS[form].dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        weight = FORMS[ctx.form].dequantise(codes, scales, grads[0].dtype)
        return ctx.of_gradient(grads[0], weight), None, None, None, None, None
