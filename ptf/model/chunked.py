"""Losses over hidden states, without a tensor of all logits [B, T, V] in memory.

Positions that are not trained are dropped before the head; the others go through it in chunks, whose size depends on
the device (`CHUNK_BYTES`). Every function returns a sum or per-token values.

The gradient is computed from the logits in the forward pass, so that a chunk needs three GEMMs a step and no
recomputation. Only `token_logprobs` recomputes its logits, because its upstream gradient is not known in the forward
pass.

Vocabulary-parallel (Megatron-LM, Shoeybi et al. 2019, section 3): every rank has all hidden states and some rows of the
head. Two numbers per token are reduced for the normaliser. The gradient of the head's rows is then complete on their
rank; the gradient of the hidden states is a sum over ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ptf.model.head import Head
from ptf.model.loss_workspace import LossWorkspace, Tiles, rows_of_a_block
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing

# Bytes that the logits of a chunk may take (`logit_bytes` each), on a CPU and on a GPU. Every chunk reads the head's
# weight twice, and reads and writes the fp32 sum of its gradient: 12 bytes an element, however many positions the chunk
# has. At 72 % of an H100's FLOPs and 85 % of its bandwidth, the three GEMMs over 110 positions (64 MiB at V = 151,936)
# take 0.2 times as long as that traffic, those over 1,766 (1 GiB) 3.5 times.
CHUNK_BYTES = 64 << 20
CUDA_CHUNK_BYTES = 1 << 30


def logit_bytes(head: Head) -> int:
    """Return the bytes of a logit in the buffer of a chunk: fp32 on a GPU, on a CPU what the GEMM writes."""
    return 4 if head.weight.device.type == "cuda" else head.weight.element_size()


def tiles_of(n: int, *heads: Head, buffers: int = 1) -> Tiles:
    """Return the chunks of n positions. They are the same on all ranks of a group, since each chunk is a collective.

    On CUDA, a computation that needs several `buffers` as large as its logits gets smaller chunks, so that all of them
    together take what one takes elsewhere. There and in a group, a chunk is one block; on a CPU blocks are as large as
    the caches of its threads.
    """
    rows = max(len(h.weight) if h.group is None else -(-h.vocab // h.group.size()) for h in heads)
    on_cuda = heads[0].weight.device.type == "cuda"
    chunk_bytes = CUDA_CHUNK_BYTES if on_cuda else CHUNK_BYTES
    size = max(1, chunk_bytes // (logit_bytes(heads[0]) * (buffers if on_cuda else 1) * rows))
    block = max(1, min(size, chunk_bytes // (4 * rows), rows_of_a_block(rows)))
    return Tiles(n, size, size if (on_cuda or any(h.group is not None for h in heads)) else block)


class WithGradients(Function):
    """A sum whose gradients by some tensors were computed with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *tensors: Tensor | None) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        """Return the gradients, multiplied in place by the upstream gradient.

        A head's gradient is too large to copy (594 MiB for 151,936 × 1,024). Because the tensors are changed, a second
        backward raises.
        """
        return None, None, *(None if t is None else t.mul_(grads[0]) for t in ctx.saved_tensors)


class _TokenLogprobs(Function):
    """The log-prob of each target, and the entropy of each distribution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, workspace: Callable[..., LossWorkspace]
    ) -> tuple[Tensor, ...]:
        picked, entropy, slack = workspace(x, head).measure()
        ctx.mark_non_differentiable(slack)
        ctx.save_for_backward(x, weight, bias, entropy)
        ctx.head, ctx.workspace = head, workspace
        # most losses do not use the entropy, whose gradient costs a buffer and three passes
        ctx.set_materialize_grads(False)
        return picked, entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # type: ignore[override]
        x, weight, bias, entropy = ctx.saved_tensors
        work = ctx.workspace(x, replace(ctx.head, weight=weight, bias=bias), needs=ctx.needs_input_grad[:3])
        of_logprobs, of_entropy = (-torch.zeros_like(entropy) if grad is None else -grad for grad in grads[:2])
        spare = None if grads[1] is None else work.new_block()
        for block in work.tiles:
            logprobs = work.logprobs(block)
            p = work.probabilities(logprobs, out=logprobs if spare is None else spare[: len(logprobs)])
            if spare is None:
                work.accumulate(block, work.subtract_targets(block, p), of_logprobs[block])
                continue
            bent = logprobs.add_(entropy[block, None]).mul_(p).mul_(of_entropy[block, None])  # ∂H/∂z = −p (log p + H)
            bent += work.subtract_targets(block, p).mul_(of_logprobs[block, None])
            work.accumulate(block, bent, torch.ones_like(entropy[block]))
        return *work.gradients(), None, None


def trained_positions(weights: Tensor) -> Tensor:
    """Return the flat indices of the positions whose weight is not 0."""
    return weights.reshape(-1).nonzero().squeeze(1)


def rows(x: Tensor, selected: Tensor) -> Tensor:
    """Return x [.., D] at the selected positions: [N, D]."""
    return x.flatten(0, -2).index_select(0, selected)


def needed(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return of which tensors a gradient is needed."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)


def _workspace(
    x: Tensor,
    head: Head,
    targets: Tensor,
    selected: Tensor,
    processing: LogitsProcessing = NO_LOGITS_PROCESSING,
    trie_states: Tensor | None = None,
    needs: tuple[bool, ...] = (False, False, False),
) -> LossWorkspace:
    """Return the workspace of x [N, D], the hidden states at the selected positions."""
    states = None if trie_states is None else trie_states.flatten(0, 1)[selected].long()
    return LossWorkspace(x, head, tiles_of(len(x), head), processing, targets.reshape(-1)[selected], states, needs)


def _weighted(
    x: Tensor, head: Head, weights: Tensor, workspace: Callable[..., LossWorkspace], *, entropies: bool
) -> tuple[Tensor, ...]:
    """Return −Σ weights · log-prob, or with `entropies` the policy-gradient surrogate
    −Σ weights · exp(logp − logp.detach()), which has the same gradient: that of the policy at ratio 1. Beside it stands
    what `LossWorkspace.measure` returns, without gradient."""
    tensors = x, head.weight, head.bias
    needs = needed(*tensors)
    with torch.no_grad():
        work = workspace(x, head, needs=needs)
        values = work.measure(weights if any(needs) else None, entropies=entropies)
        loss = -weights.sum(dtype=torch.float32) if entropies else (-(values[0] * weights)).sum(dtype=torch.float32)
        gradients = work.gradients()
    return WithGradients.apply(loss, gradients, *tensors), *values


def cross_entropy(x: Tensor, head: Head, targets: Tensor, weights: Tensor, selected: Tensor | None = None) -> Tensor:
    """Return Σ weights · (−log p(target)), an fp32 scalar that can be differentiated once.

    `x` is [B, T, D]; `targets` and `weights` are [B, T]. `selected` [N] are the flat indices of the positions whose
    weight is not 0; without it `nonzero()` finds them, for which the host waits for the GPU.
    """
    selected = trained_positions(weights) if selected is None else selected
    work = partial(_workspace, targets=targets, selected=selected)
    return _weighted(rows(x, selected), head, weights.reshape(-1)[selected], work, entropies=False)[0]


def next_token_loss(x: Tensor, head: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a model that is trained on text, and each document's part of it.

    The loss is the cross-entropy over the vocabulary, and the parts are [documents], without gradient; with a head of
    the user's own it is that head's loss, and the parts are None.
    """
    if not isinstance(head, Head):
        return head.loss(x, batch), None
    selected = batch.trained_positions
    work = partial(_workspace, targets=batch.targets, selected=selected)
    weights = batch.loss_weights.reshape(-1)[selected]
    loss, logprobs = _weighted(rows(x, selected), head, weights, work, entropies=False)
    parts = torch.zeros(len(batch.lengths), device=x.device)
    return loss, parts.index_add(0, batch.segments.reshape(-1)[selected], -(logprobs * weights))


class TokenLogprobs(NamedTuple):
    """The log-prob and entropy of sampled tokens under a model: [B, T] each, fp32, 0 at untrained positions."""

    logprobs: Tensor
    entropy: Tensor  # entropy of the distribution at each position
    # largest change of the log-prob if rounding had made the nucleus end at a different token
    slack: Tensor


def scatter(selected: Tensor, weights: Tensor, columns: tuple[Tensor, ...]) -> TokenLogprobs:
    """Return the values of the selected positions as [B, T] tensors, 0 elsewhere."""
    empty = torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
    return TokenLogprobs(*(empty.index_put((selected,), values).view_as(weights) for values in columns))


def sampled_from(batch: Any, processing: LogitsProcessing = NO_LOGITS_PROCESSING) -> dict[str, Any]:
    """Return the targets of a batch (ptf.data.batch.Batch) and the distribution that they were drawn from, as arguments
    of `token_logprobs` and `surrogate`."""
    return {
        "targets": batch.targets,
        "weights": batch.loss_weights,
        "processing": processing,
        "trie_states": batch.token_columns.get("trie_states"),
        "selected": batch.trained_positions,
    }


def surrogate(
    x: Tensor,
    head: Head,
    targets: Tensor,
    weights: Tensor,
    coefficients: Tensor,
    processing: LogitsProcessing = NO_LOGITS_PROCESSING,
    trie_states: Tensor | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, TokenLogprobs]:
    """Return a loss whose gradient is that of −Σ coefficients · log-prob, and the values of `token_logprobs`.

    The loss is −Σ coefficients · exp(logp − logp.detach()), an fp32 scalar that can be differentiated once. The other
    values have no gradient. `targets`, `weights` and `coefficients` are [B, T]; positions of weight 0 are ignored.
    `selected` is as in `cross_entropy`.
    """
    selected = trained_positions(weights) if selected is None else selected
    work = partial(_workspace, targets=targets, selected=selected, processing=processing, trie_states=trie_states)
    coefficients = coefficients.reshape(-1)[selected]
    loss, *values = _weighted(rows(x, selected), head, coefficients, work, entropies=True)
    return loss, scatter(selected, weights, tuple(values))


def token_logprobs(
    x: Tensor,
    head: Head,
    targets: Tensor,
    weights: Tensor,
    processing: LogitsProcessing = NO_LOGITS_PROCESSING,
    trie_states: Tensor | None = None,
    selected: Tensor | None = None,
) -> TokenLogprobs:
    """Return the log-prob of each target whose weight is not 0, under the distribution that it was sampled from.

    `trie_states` [B, T, 1 + k] are states of the trie `processing.edges` (see `restrict`); `selected` is as in
    `cross_entropy`.
    """
    selected = trained_positions(weights) if selected is None else selected
    work = partial(_workspace, targets=targets, selected=selected, processing=processing, trie_states=trie_states)
    return scatter(selected, weights, _TokenLogprobs.apply(rows(x, selected), head.weight, head.bias, head, work))
