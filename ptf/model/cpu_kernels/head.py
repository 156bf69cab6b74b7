"""The log-probs of a head in bf16 by head.cpp, with its three products: logits and all sums are in fp32, as on a GPU,
and a block of the vocabulary stays in the cache from its logits to the gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from ptf.model.cpu_kernels.library import library, takes
from ptf.model.cpu_kernels.loss import require_columns

# of a chunk's exponentials in bf16: every chunk reads the weight twice and adds to its gradient, which a single chunk
# writes at once
CHUNK_BYTES = 384 << 20
ROWS = 1536  # of a chunk at most, so that the gradients of a block of tokens stay in the caches


def computes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes x [N, D] and a head's weight [V, D]: in bf16 and contiguous, on a CPU that
    multiplies bf16 and no matrices of it (AVX512-BF16 without AMX), with D a multiple of two registers."""
    return (
        x.dtype == torch.bfloat16
        and takes(x, weight)
        and weight.is_contiguous()
        and (kernels := library()).multiplies_pairs
        and x.shape[1] % (2 * kernels.width) == 0
    )


class HeadLogprobs(NamedTuple):
    """The log-probs of targets and the entropies of their distributions, fp32 [N] each, and the gradients of −Σ weights
    · log-prob of x and of the weight, in bf16, or None."""

    logprobs: Tensor
    entropies: Tensor
    of_x: Tensor | None
    of_weight: Tensor | None


def logprobs(
    x: Tensor, weight: Tensor, real: int, targets: Tensor, weights: Tensor | None, *, of_x: bool, of_weight: bool
) -> HeadLogprobs:
    """Return the log-probs of targets [N], and the gradients as they are asked for, for which `weights` are needed.

    x is [N, D] and the weight [V, D], whose rows from `real` on are padding; targets and weights are [N]. Raises
    IndexError for a target that is not among the real rows.
    """
    require_columns(targets, real)
    x, targets = x.contiguous(), targets.long().contiguous()
    weights = weights.float().contiguous() if weights is not None and (of_x or of_weight) else None
    panel, threads = 2 * library().width, torch.get_num_threads()
    most = min(ROWS, max(panel, CHUNK_BYTES // (2 * real)))
    size = panel * max(1, -(-len(x) // -(-len(x) // most or 1) // panel))  # chunks of one size, whole panels
    found, entropies = (torch.empty(len(x), dtype=torch.float32) for _ in range(2))
    dx = torch.empty_like(x) if of_x else None
    dweight = torch.empty_like(weight) if of_weight else None
    if dweight is not None:
        dweight[real if len(x) else 0 :] = 0
    sums = torch.empty_like(weight[:real], dtype=torch.float32) if of_weight and len(x) > size else None
    kept = x.new_empty(0 if weights is None else real * size)
    assert all(t is None or t.data_ptr() % 64 == 0 for t in (kept, dweight)), (
        "what is written past the caches is aligned"
    )
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        given = weights if weights is None else weights[rows]
        into = dx if dx is None else dx[rows], sums, dweight if rows.stop == len(x) else None
        sizes = rows.stop - start, x.shape[1], real, int(start == 0), threads
        values = found[rows], entropies[rows]
        library().call("head_logprobs", x[rows], weight, targets[rows], given, *values, kept, *into, *sizes)
    return HeadLogprobs(found, entropies, dx, dweight)
