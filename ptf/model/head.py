"""The output projection as losses and samplers use it: which rows of the vocabulary its weights are, and how logits are
computed from them."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ptf.model.kernels.choice import PLAIN, Kernels


def sums_in_fp32(x: Tensor) -> bool:
    """Whether torch can return the product of tensors like x in fp32, as its GEMM summed it: for 16 bits on CUDA.

    Rounding to bf16 changes a logit of 40 by up to 0.125. torch's CPU GEMM has no such output.
    """
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


class _WideProduct(Function):
    """x [n, D] · weight [V, D]ᵀ in fp32, from tensors of 16 bits; torch has no derivative of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.t() @ x


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection. With a `group` (vocabulary-parallel), all ranks have the same hidden states, and each has
    different rows of the vocabulary."""

    weight: Tensor  # [V, D], or this rank's rows of it
    vocab: int  # real rows of the whole vocabulary; rows from here on are padding and never count (but must be finite)
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap)
    bias: Tensor | None = None  # [V], for the rows of `weight`
    vocab_start: int = 0  # which row of the whole vocabulary `weight` begins with
    group: ProcessGroup | None = None  # the ranks that hold the other rows
    kernels: Kernels = PLAIN

    @property
    def real(self) -> int:
        """How many of the rows of `weight` are not padding."""
        return min(max(self.vocab - self.vocab_start, 0), len(self.weight))

    def logits(self, x: Tensor) -> Tensor:
        """Return fp32 logits [..., vocab] for x [..., D]: soft-capped, without padding.

        Without a group they are differentiable. With one they are gathered without gradient, for sampling only.
        """
        weight = self.weight[: self.real]
        if sums_in_fp32(x):
            y = cast("Tensor", _WideProduct.apply(x.flatten(0, -2), weight)).unflatten(0, x.shape[:-1])
        else:
            y = self.kernels.linear(x, weight).float()
        if self.bias is not None:
            y = y + self.bias[: self.real]
        if self.softcap is not None:
            y = self.softcap * (y / self.softcap).tanh()
        if self.group is None:
            return y
        whole = y.new_zeros(*y.shape[:-1], self.vocab)
        whole[..., self.vocab_start : self.vocab_start + self.real] = y.detach()
        dist.all_reduce(whole, group=self.group)  # a sum with zeros, for ranks need not hold equally many rows
        return whole
