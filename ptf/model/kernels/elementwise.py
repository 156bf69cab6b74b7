"""What lies between the products of matrices: norms, gates, and the loss of logits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.model.config import Activation

SWISH = 1.702  # GPT-OSS: gate · sigmoid(1.702 gate)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}


def normalised(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """Normalise in fp32 and scale by `weight`, in the dtype of x; with `offset`, scale by 1 + weight in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = F.rms_norm(x.to(wide), x.shape[-1:], eps=eps)
    if offset:
        return (normal * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * normal.to(x.dtype)


def gated(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up."""
    return activate(gate) * up


def clamped(clamp: float, gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gate of GPT-OSS: (up + 1) · gate · sigmoid(1.702 gate), of values that are clamped first."""
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (up + 1) * (gate * torch.sigmoid(SWISH * gate))


def loss_of_rows(logits: Tensor, targets: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Return the targets' log-probs [n] of logits [n, V], and write the gradient of −Σ weights · log-prob with respect
    to the logits to `out`, in its dtype."""
    logprobs = logits.log_softmax(-1)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    out.copy_((logprobs.exp() - hit.to(logits.dtype)) * weights[:, None])
    return logprobs.gather(1, targets[:, None]).squeeze(1)


LOSSES = 64  # compiled at most: for each vocabulary and dtype


@functools.cache
def _compiled_loss() -> Callable[..., Tensor]:
    compiler: Any = torch.compile  # whose type knows no recompile_limit yet
    return compiler(loss_of_rows, dynamic=False, recompile_limit=LOSSES)


def compiled_loss(*rows: Tensor) -> Tensor:
    """Compute `loss_of_rows` compiled for any number of rows, so that softmax, exponential, subtraction and product are
    no passes of their own over the logits (docs/gpu_status.md)."""
    for tensor in rows:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled_loss()(*rows)
