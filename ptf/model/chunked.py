"""Losses over hidden states, without a tensor of all logits [B, T, V] in memory.

Positions that are not trained are dropped before the head; the others go through it in chunks, whose size depends on
the device (`chunk_bytes`). Every function returns a sum or per-token values.

The gradient is computed from the logits in the forward pass, so that a chunk needs three GEMMs a step and no
recomputation. Only `token_logprobs` recomputes its logits, because its upstream gradient is not known in the forward
pass.

Vocabulary-parallel (Megatron-LM, Shoeybi et al. 2019, section 3): every rank has all hidden states and some rows of the
head. Two numbers per token are reduced for the normaliser. The gradient of the head's rows is then complete on their
rank; the gradient of the hidden states is a sum over ranks.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ptf.model.head import Head
from ptf.model.projection import Chunks, Projection, rows_of_a_block, summed
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing

CHUNK_BYTES = 64 << 20  # on a CPU
CUDA_CHUNK_BYTES = 1 << 30


def chunk_bytes(device: torch.device) -> int:
    """Return how many bytes the logits of a chunk may take (`logit_bytes` each).

    Every chunk reads the head's weight twice, and reads and writes the fp32 sum of its gradient: 12 bytes an element,
    however many positions the chunk has. At 72 % of an H100's FLOPs and 85 % of its bandwidth, the three GEMMs over 110
    positions (64 MiB at V = 151,936) take 0.2 times as long as that traffic, those over 1,766 (1 GiB) 3.5 times.
    """
    return CUDA_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES


def logit_bytes(head: Head) -> int:
    """Return the bytes of a logit in the buffer of a chunk: fp32 on a GPU, on a CPU what the GEMM writes."""
    return 4 if head.weight.device.type == "cuda" else head.weight.element_size()


def chunks_of(n: int, *heads: Head, buffers: int = 1) -> Chunks:
    """Return the chunks of n positions. They are the same on all ranks of a group, since each chunk is a collective.

    On CUDA, a computation that needs several `buffers` as large as its logits gets smaller chunks, so that all of them
    together take what one takes elsewhere. There and in a group, a chunk is one block; on a CPU blocks are as large as
    the caches of its threads.
    """
    rows = max(len(h.weight) if h.group is None else -(-h.vocab // h.group.size()) for h in heads)
    device = heads[0].weight.device
    each = logit_bytes(heads[0]) * (buffers if device.type == "cuda" else 1)
    size = max(1, chunk_bytes(device) // (each * rows))
    block = max(1, min(size, chunk_bytes(device) // (4 * rows), rows_of_a_block(rows)))
    whole = device.type == "cuda" or any(h.group is not None for h in heads)
    return Chunks(n, size, size if whole else block)


class _Targets:
    """The column of each target's logit [N] among this rank's part of the vocabulary."""

    def __init__(self, targets: Tensor, head: Head) -> None:
        here = targets - head.first
        self.at = here if head.group is None else here.clamp(0, len(head.weight) - 1)
        # 0 if a different rank has the target
        self.counts = torch.ones_like(here, dtype=torch.float32) if head.group is None else (here == self.at).float()

    def pick(self, block: slice, values: Tensor) -> Tensor:
        """Return the targets' entries [n] of `values` [n, V], to be summed over the ranks."""
        return values.gather(1, self.at[block, None]).squeeze(1) * self.counts[block]

    def subtract(self, block: slice, values: Tensor) -> Tensor:
        """Subtract 1 at each target of `values` [n, V], in place."""
        return values.scatter_add_(1, self.at[block, None], -self.counts[block, None])


def scaled(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients that the forward pass saved, multiplied in place by the upstream gradient.

    A head's gradient is too large to copy (594 MiB for 151,936 × 1,024). Because the tensors are changed, a second
    backward raises.
    """
    return tuple(None if t is None else t.mul_(upstream) for t in ctx.saved_tensors)


class _CrossEntropy(Function):
    """Weighted cross-entropy: the sum, and the weighted loss of each target, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        projection = Projection(x, head, chunks, needs=ctx.needs_input_grad[:3])
        values = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for block in chunks:
            if projection.fuses_loss:
                values[block] = projection.cross_entropy(block, targets[block], weights[block])
                continue
            logprobs = projection.logprobs(block)
            values[block] = where.pick(block, logprobs)
            if any(ctx.needs_input_grad):
                projection.accumulate(
                    block, where.subtract(block, projection.probabilities(logprobs, out=logprobs)), weights[block]
                )
        ctx.save_for_backward(*projection.gradients())
        values = -summed(values * weights, head.group)
        ctx.mark_non_differentiable(values)
        return values.sum(dtype=torch.float32), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        return *scaled(ctx, grads[0]), None, None, None


class _Surrogate(Function):
    """Policy-gradient surrogate −Σ c · exp(logp − logp.detach()), whose gradient is that of the policy at ratio 1.

    Also returns the log-probs, entropies and slacks, which have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        processing: LogitsProcessing,
        trie_states: Tensor | None,
        coefficients: Tensor,
    ) -> tuple[Tensor, ...]:
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        projection = Projection(x, head, chunks, processing, targets, trie_states, ctx.needs_input_grad[:3])
        picked = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.empty_like(picked)
        for block in chunks:
            logprobs = projection.logprobs(block)
            picked[block] = where.pick(block, logprobs)
            entropy[block] = projection.entropies(logprobs, leave_probabilities=any(ctx.needs_input_grad))
            if any(ctx.needs_input_grad):
                projection.accumulate(block, where.subtract(block, logprobs), coefficients[block])
        picked, entropy, slack = summed(picked, head.group), summed(entropy, head.group), projection.slack_of(picked)
        ctx.save_for_backward(*projection.gradients())
        ctx.mark_non_differentiable(picked, entropy, slack)
        return -coefficients.sum(dtype=torch.float32), picked, entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        return *scaled(ctx, grads[0]), None, None, None, None, None


class _TokenLogprobs(Function):
    """The log-prob of each target, and the entropy of each distribution."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        processing: LogitsProcessing,
        trie_states: Tensor | None,
    ) -> tuple[Tensor, ...]:
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        projection = Projection(x, head, chunks, processing, targets, trie_states)
        picked = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.empty_like(picked)
        for block in chunks:
            logprobs = projection.logprobs(block)
            picked[block] = where.pick(block, logprobs)
            entropy[block] = projection.entropies(logprobs, leave_probabilities=False)
        picked, entropy, slack = summed(picked, head.group), summed(entropy, head.group), projection.slack_of(picked)
        ctx.mark_non_differentiable(slack)
        ctx.save_for_backward(x, weight, bias, targets, entropy, trie_states)
        ctx.head, ctx.processing = head, processing
        # most losses do not use the entropy, whose gradient costs a buffer and three passes
        ctx.set_materialize_grads(False)
        return picked, entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # type: ignore[override]
        x, weight, bias, targets, entropy, trie_states = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        projection = Projection(x, head, chunks, ctx.processing, targets, trie_states, ctx.needs_input_grad[:3])
        of_logprobs, of_entropy = (-torch.zeros_like(entropy) if grad is None else -grad for grad in grads[:2])
        spare = None if grads[1] is None else projection.new_block()
        for block in chunks:
            logprobs = projection.logprobs(block)
            if spare is None:
                projection.accumulate(
                    block, where.subtract(block, projection.probabilities(logprobs, out=logprobs)), of_logprobs[block]
                )
                continue
            p = projection.probabilities(logprobs, out=spare[: len(logprobs)])
            bent = logprobs.add_(entropy[block, None]).mul_(p).mul_(of_entropy[block, None])  # ∂H/∂z = −p (log p + H)
            bent += where.subtract(block, p).mul_(of_logprobs[block, None])
            projection.accumulate(block, bent, torch.ones_like(entropy[block]))
        return *projection.gradients(), None, None, None, None


def trained_positions(weights: Tensor) -> Tensor:
    """Return the flat indices of the positions whose weight is not 0."""
    return weights.reshape(-1).nonzero().squeeze(1)


def function_inputs(x: Tensor, selected: Tensor, head: Head) -> list[Tensor | None]:
    """Return the tensors that may need a gradient: x [N, D] at the selected positions, the head's weight and its bias.

    They are detached under `no_grad`, because the forward pass of an autograd Function cannot detect it.
    """
    tensors = [x.flatten(0, -2).index_select(0, selected), head.weight, head.bias]
    return tensors if torch.is_grad_enabled() else [t if t is None else t.detach() for t in tensors]


def cross_entropy(x: Tensor, head: Head, targets: Tensor, weights: Tensor, selected: Tensor | None = None) -> Tensor:
    """Return Σ weights · (−log p(target)), an fp32 scalar that can be differentiated once.

    `x` is [B, T, D]; `targets` and `weights` are [B, T]. `selected` [N] are the flat indices of the positions whose
    weight is not 0; without it `nonzero()` finds them, for which the host waits for the GPU.
    """
    return _losses(x, head, targets, weights, trained_positions(weights) if selected is None else selected)[0]


def cross_entropy_by(
    x: Tensor, head: Head, targets: Tensor, weights: Tensor, groups: Tensor, count: int, selected: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy`, and each group's part of it [count], which has no gradient.

    `groups` [B, T] is the number of each position's group, from 0 to `count` - 1.
    """
    loss, losses = _losses(x, head, targets, weights, selected)
    return loss, torch.zeros(count, device=x.device).index_add(0, groups.reshape(-1)[selected], losses)


def _losses(x: Tensor, head: Head, targets: Tensor, weights: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    return _CrossEntropy.apply(
        *function_inputs(x, selected, head), head, targets.reshape(-1)[selected], weights.reshape(-1)[selected]
    )


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


def select(values: Tensor | None, selected: Tensor) -> Tensor | None:
    """Return the states of the selected positions."""
    return None if values is None else values.flatten(0, 1)[selected].long()


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
    sampled = targets.reshape(-1)[selected], processing, select(trie_states, selected)
    loss, *values = _Surrogate.apply(
        *function_inputs(x, selected, head), head, *sampled, coefficients.reshape(-1)[selected]
    )
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
    sampled = targets.reshape(-1)[selected], processing, select(trie_states, selected)
    return scatter(selected, weights, _TokenLogprobs.apply(*function_inputs(x, selected, head), head, *sampled))
