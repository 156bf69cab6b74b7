"""Output projections as losses and samplers use them: to the vocabulary, with the rows of it that the weights are and
how logits are computed from them; and to one value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ptf.errors import UserError
from ptf.model.kernels.choice import PLAIN, Kernels

HF_NAME = "score.weight"
CLASSIFIER = "ForSequenceClassification"


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


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value per position, which reward models and critics compute from the hidden states.

    The head is a projection to one row, which transformers' `...ForSequenceClassification` calls `score.weight` and
    reads at the last token. The product is taken in fp32, because the margin between two scores is smaller than the
    scores are.
    """

    weight: Tensor  # [1, D]

    def values(self, x: Tensor) -> Tensor:
        """Return the value of each position, [..., D] → fp32 [...]. It is no view: FSDP warns of outputs that are."""
        return (x.float() @ self.weight.float().t()).squeeze(-1).clone()


def head_output(tokens: np.ndarray, x: Tensor, head: Any) -> Tensor:
    """Apply a scalar or custom head to the hidden states of a sequence of tokens, int32: [1, T, D] → [T, …]."""
    if getattr(head, "takes_contexts", False):
        return head(x[0], [tokens[: n + 1] for n in range(len(tokens))])
    return (head.values(x) if isinstance(head, Scalar) else head(x))[0]


def is_scalar(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a checkpoint with a scalar head.

    Raise UserError for a classifier of several classes.
    """
    scalar = any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())
    classes = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if scalar and classes != 1:
        raise UserError(
            f"model.path: the checkpoint classifies into {classes} classes; a scalar head needs num_labels 1"
        )
    return scalar


def as_scalar(config: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Return the config.json of the same model as a classifier with one output.

    transformers reads the score at the last token that is not `pad_id`. Raise UserError for a model of which
    transformers has no classifier with these names.
    """
    if "text_config" in config:
        raise UserError(
            f"{config['model_type']} is multimodal, and with a scalar head it cannot be written as a transformers "
            "checkpoint; use its text model"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    if config["model_type"] not in CLASSES:
        raise UserError(
            f"transformers has no classifier of {config['model_type']}, so with a scalar head it cannot be written as "
            "a transformers checkpoint; use another model"
        )
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    return {**config, "architectures": [CLASSES[config["model_type"]]], **labels, "pad_token_id": pad_id}
