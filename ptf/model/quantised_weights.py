"""Weights that do not train, held in four bits, and their products with activations.

NF4 (Dettmers et al. 2023): blocks of 64 values along a row share a scale in fp32, and each value is one of 16 quantiles
of the normal distribution. A weight `NAME` [.., out, in] becomes two parameters of bytes, which FSDP shards and gathers
as they are: `NAME_codes` [.., out, in / 2] has two values in each byte, `NAME_scales` [.., out, in / 16] the bytes of
the scales. That is 4.5 bits for each weight. A weight is dequantised for a product, and again for the product of its
backward pass; between the two, nothing but its bytes is held. bitsandbytes converts, so that its 4-bit models and ours
have the same values.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ptf.errors import UserError

BLOCK = 64  # values that share a scale
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The unified names of a quantised weight's parameters, and the shape of the weight itself."""

    codes: str
    scales: str
    shape: torch.Size


@functools.cache
def _bitsandbytes() -> Any:
    """Return bitsandbytes' functions. Raises UserError if it is not installed."""
    # it warns of kernels for the CPU that it would download, and that nothing here calls
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functions
    except ImportError as error:
        raise UserError("model.quantization: nf4 needs bitsandbytes: pip install 'ptf[nf4]'") from error
    return functions


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [.., in / 2] and the scales [.., in / 16] of a weight [.., in], both as bytes."""
    *outer, width = weight.shape
    codes, state = _bitsandbytes().quantize_4bit(
        weight.contiguous().view(-1, width), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
    )
    return codes.view(*outer, width // 2), state.absmax.view(torch.uint8).view(*outer, width // BLOCK * SCALE_BYTES)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [.., in] of these codes and scales; value times scale is rounded once, to `dtype`."""
    *outer, half = codes.shape
    functions, rows = _bitsandbytes(), codes.numel() // half
    state = functions.QuantState(
        absmax=scales.reshape(-1).view(torch.float32),
        shape=torch.Size((rows, 2 * half)),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    return functions.dequantize_4bit(codes.reshape(-1, 1), state).view(*outer, 2 * half)


def quantise_weight(module: nn.Module, weight: str, name: str) -> None:
    """Replace a parameter of a module by codes and scales, which have no values yet; `name` is its unified name.

    Raises UserError if its rows are not made of whole blocks.
    """
    shape = getattr(module, weight).shape
    if shape[-1] % BLOCK:
        raise UserError(f"model.quantization: the rows of {name} have {shape[-1]} values, not a multiple of {BLOCK}")
    delattr(module, weight)
    for part, width in (("codes", shape[-1] // 2), ("scales", shape[-1] // BLOCK * SCALE_BYTES)):
        values = torch.zeros(*shape[:-1], width, dtype=torch.uint8)
        module.register_parameter(f"{weight}_{part}", Parameter(values, requires_grad=False))
    module.quantised = {**getattr(module, "quantised", {}), weight: shape}  # type: ignore[assignment]


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """Return the quantised weights of a model by the unified name of the weight."""
    found: dict[str, QuantisedWeight] = {}
    for path, module in model.named_modules():
        for weight, shape in getattr(module, "quantised", {}).items():
            name = f"{path}.{weight}"
            found[name] = QuantisedWeight(f"{name}_codes", f"{name}_scales", shape)
    return found


def weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's weights by unified name; a quantised weight counts as one, not as two."""
    quantised = quantised_weights(model)
    parts = {name: weight for weight, of in quantised.items() for name in (of.codes, of.scales)}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        weight = parts.get(name, name)
        shapes[weight] = quantised[weight].shape if weight in quantised else parameter.shape
    return shapes


class QuantisedLinear(nn.Linear):
    """A projection whose weight may be quantised (`quantise_weight`)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection of `input`."""
        return linear(self, input)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Return the projection [.., out] of x [.., in] by a module's own weight, quantised or not, and its bias."""
    if "weight" not in getattr(module, "quantised", {}):
        return F.linear(x, module.weight, module.bias)
    bias = module.bias
    if bias is not None and bias.requires_grad:
        return _Product.apply(x, *_parts(module, "weight"), F.linear, torch.matmul) + bias
    product = functools.partial(F.linear, bias=bias)  # which rounds once, as without packing
    return _Product.apply(x, *_parts(module, "weight"), product, torch.matmul)


def grouped_linear(module: nn.Module, weight: str, x: Tensor, ends: Tensor) -> Tensor:
    """Return the product [n, out] of each row of x [n, in] with its expert's matrix in a stacked weight.

    The weight may be quantised. `ends` [experts] is the end of each expert's rows.
    """
    if weight not in getattr(module, "quantised", {}):
        return F.grouped_mm(x, getattr(module, weight).transpose(-2, -1), offs=ends)

    def forward(rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)

    def backward(grad: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(grad, matrices, offs=ends)

    return _Product.apply(x, *_parts(module, weight), forward, backward)


def _parts(module: nn.Module, weight: str) -> tuple[Tensor, Tensor]:
    return getattr(module, f"{weight}_codes"), getattr(module, f"{weight}_scales")


class _Product(Function):
    """A product of activations with a quantised weight, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        product: Callable[[Tensor, Tensor], Tensor],
        of_gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.of_gradient = of_gradient
        return product(x, dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        weight = dequantise(codes, scales, grads[0].dtype)
        return ctx.of_gradient(grads[0], weight), None, None, None, None
