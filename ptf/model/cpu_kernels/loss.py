"""Log-probs of targets and the gradient of their cross-entropy by loss.cpp: one call for a chunk of logits, which are
read three times and lie in one buffer, in place of a pass over them for each operation."""

import torch
from torch import Tensor

from ptf.model.cpu_kernels.library import library


def write_gradient(logits: Tensor, real: int, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the log-probs of targets [n], fp32, from logits [n, V] in fp32 or bf16, of which `real` columns count.

    With `weights` [n], write the gradient of −Σ weights · log-prob with respect to the logits over them. Probabilities
    below e⁻⁶⁴ count as 0 there.
    """
    require_columns(targets, real)
    found = torch.empty(len(logits), dtype=torch.float32)
    wide = None if weights is None else weights.float().contiguous()
    sizes = *logits.shape[:1], real, logits.shape[1]
    narrow = int(logits.dtype == torch.bfloat16)
    library().call(
        "cross_entropy", logits, narrow, targets.long().contiguous(), wide, found, *sizes, torch.get_num_threads()
    )
    return found


def require_columns(targets: Tensor, real: int) -> None:
    """Raise IndexError unless all targets are among the `real` columns."""
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < real:
        raise IndexError(f"a target is not among the {real} columns: {int(targets.min())} to {int(targets.max())}")


def add(total: Tensor, part: Tensor, *, first: bool) -> None:
    """Add a part in bf16 to a total in fp32, both contiguous; the `first` is written over it."""
    library().call("add_rounded", total, part, part.numel(), int(first), torch.get_num_threads())
