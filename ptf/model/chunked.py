"""Losses over hidden states that never hold [B, T, V]: positions that are not trained are dropped before the head, the rest goes through it
in chunks whose fp32 logits take about 64 MiB. Every function returns a sum or per-token values.

The one idea: a gradient is taken where the logits are, in the forward, so that a step needs three GEMMs a chunk and nothing is recomputed.
Only `token_logprobs`, whose upstream gradient is not known by then, makes its logits again.

Vocabulary-parallel (Megatron-LM, Shoeybi et al. 2019, section 3): every rank has all hidden states and some rows of the head. Two numbers a
token are reduced for the normaliser. The head's gradient is then complete where its rows are; that of the hidden states is a sum over ranks.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ptf.model.head import Head
from ptf.model.projection import Projection, summed
from ptf.model.sampling import AS_IT_IS, Processing

CHUNK_BYTES = 64 << 20


def chunks_of(n: int, *heads: Head) -> list[slice]:
    """Equal on every rank of a group, for each chunk is a collective."""
    rows = max(len(h.weight) if h.group is None else -(-h.vocab // h.group.size()) for h in heads)
    size = max(1, CHUNK_BYTES // (4 * rows))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _Targets:
    """Where the logit of each target [N] lies."""

    def __init__(self, targets: Tensor, head: Head) -> None:
        here = targets - head.first
        self.at = here if head.group is None else here.clamp(0, len(head.weight) - 1)
        self.counts = torch.ones_like(here, dtype=torch.float32) if head.group is None else (here == self.at).float()  # 0: on another rank

    def pick(self, chunk: slice, values: Tensor) -> Tensor:
        """Of values [n, V]: [n], to be summed over the ranks."""
        return values.gather(1, self.at[chunk, None]).squeeze(1) * self.counts[chunk]

    def subtract(self, chunk: slice, values: Tensor) -> Tensor:
        """1 from the target's place in values [n, V], in place."""
        return values.scatter_add_(1, self.at[chunk, None], -self.counts[chunk, None])


def scaled(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients that the forward saved, times the loss's, in place: a head's is too big for a copy (594 MiB for 151,936 × 1,024). A second
    backward finds them changed and raises."""
    return tuple(None if t is None else t.mul_(upstream) for t in ctx.saved_tensors)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        ours = Projection(x, head, chunks, needs=ctx.needs_input_grad[:3])
        values = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for chunk in chunks:
            logprobs = ours.logprobs(chunk)
            values[chunk] = where.pick(chunk, logprobs)
            if any(ctx.needs_input_grad):
                ours.pull(chunk, where.subtract(chunk, ours.probabilities(logprobs, out=logprobs)), weights[chunk])
        ctx.save_for_backward(*ours.gradients())
        values = -summed(values * weights, head.group)
        ctx.mark_non_differentiable(values)
        return values.sum(dtype=torch.float32), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return *scaled(ctx, grads[0]), None, None, None


class _Surrogate(Function):
    """−Σ coefficient · exp(log-prob − its own value): the gradient of a policy at itself; with log-probs and entropies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, how: Processing, states: Tensor | None, coefficients: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        ours = Projection(x, head, chunks, how, targets, states, ctx.needs_input_grad[:3])
        picked = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.empty_like(picked)
        for chunk in chunks:
            logprobs = ours.logprobs(chunk)
            picked[chunk] = where.pick(chunk, logprobs)
            entropy[chunk] = ours.entropies(logprobs, leave_probabilities=any(ctx.needs_input_grad))
            if any(ctx.needs_input_grad):
                ours.pull(chunk, where.subtract(chunk, logprobs), coefficients[chunk])
        ctx.save_for_backward(*ours.gradients())
        picked, entropy, slack = summed(picked, head.group), summed(entropy, head.group), ours.slack_of(picked)
        ctx.mark_non_differentiable(picked, entropy, slack)
        return -coefficients.sum(dtype=torch.float32), picked, entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return *scaled(ctx, grads[0]), None, None, None, None, None


class _TokenLogprobs(Function):
    """Log-prob of each target and entropy of each distribution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, how: Processing, states: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        ours = Projection(x, head, chunks, how, targets, states)
        picked = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.empty_like(picked)
        for chunk in chunks:
            logprobs = ours.logprobs(chunk)
            picked[chunk] = where.pick(chunk, logprobs)
            entropy[chunk] = ours.entropies(logprobs, leave_probabilities=False)
        entropy = summed(entropy, head.group)
        slack = ours.slack_of(picked)
        ctx.mark_non_differentiable(slack)
        ctx.save_for_backward(x, weight, bias, targets, entropy, states)
        ctx.head, ctx.how = head, how
        ctx.set_materialize_grads(False)  # most losses have none of the entropy, and it costs a buffer and three passes
        return summed(picked, head.group), entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        x, weight, bias, targets, entropy, states = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        chunks, where = chunks_of(len(x), head), _Targets(targets, head)
        ours = Projection(x, head, chunks, ctx.how, targets, states, ctx.needs_input_grad[:3])
        of_logprobs, of_entropy = (-torch.zeros_like(entropy) if grad is None else -grad for grad in grads[:2])
        spare = None if grads[1] is None else torch.empty_like(ours.wide)
        for chunk in chunks:
            logprobs = ours.logprobs(chunk)
            if spare is None:
                ours.pull(chunk, where.subtract(chunk, ours.probabilities(logprobs, out=logprobs)), of_logprobs[chunk])
                continue
            p = ours.probabilities(logprobs, out=spare[: len(logprobs)])
            bent = logprobs.add_(entropy[chunk, None]).mul_(p).mul_(of_entropy[chunk, None])  # ∂H/∂z = −p (log p + H)
            bent += where.subtract(chunk, p).mul_(of_logprobs[chunk, None])
            ours.pull(chunk, bent, torch.ones_like(entropy[chunk]))
        return *ours.gradients(), None, None, None, None


def trained(weights: Tensor) -> Tensor:
    return weights.reshape(-1).nonzero().squeeze(1)


def inputs(x: Tensor, kept: Tensor, head: Head) -> list[Tensor | None]:
    """What may have a gradient: x [N, D] of the positions kept, the head's weight and its bias. A Function does not notice `no_grad` by itself."""
    inputs = [x.flatten(0, -2).index_select(0, kept), head.weight, head.bias]
    return inputs if torch.is_grad_enabled() else [t if t is None else t.detach() for t in inputs]


def cross_entropy(x: Tensor, head: Head, targets: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · (−log p(target)), fp32 scalar. x [B, T, D], targets and weights [B, T]. It can be differentiated once."""
    return _losses(x, head, targets, weights, trained(weights))[0]


def cross_entropy_by(x: Tensor, head: Head, targets: Tensor, weights: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, and without gradient the part that each of `count` groups of positions has in it [count]; groups [B, T]."""
    kept = trained(weights)
    loss, losses = _losses(x, head, targets, weights, kept)
    return loss, torch.zeros(count, device=x.device).index_add(0, groups.reshape(-1)[kept], losses)


def _losses(x: Tensor, head: Head, targets: Tensor, weights: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return _CrossEntropy.apply(*inputs(x, kept, head), head, targets.reshape(-1)[kept], weights.reshape(-1)[kept])  # type: ignore[return-value]


class Said(NamedTuple):
    """What a model says of tokens that were drawn: [B, T] each, fp32, 0 where nothing counts."""

    logprobs: Tensor
    entropy: Tensor  # of the distribution that each was drawn from
    slack: Tensor  # by how much the log-prob would differ had its nucleus ended at a sum that is the same but for rounding


def said(kept: Tensor, weights: Tensor, found: tuple[Tensor, ...]) -> Said:
    empty = torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
    return Said(*(empty.index_put((kept,), values).view_as(weights) for values in found))


def of_kept(values: Tensor | None, kept: Tensor) -> Tensor | None:
    return None if values is None else values.flatten(0, 1)[kept].long()


def surrogate(
    x: Tensor, head: Head, targets: Tensor, weights: Tensor, coefficients: Tensor, how: Processing = AS_IT_IS, states: Tensor | None = None
) -> tuple[Tensor, Said]:  # fmt: skip
    """−Σ coefficient · ratio of each target to itself, whose gradient is that of −Σ coefficient · log-prob; and what `token_logprobs` gives, without a
    gradient. The loss is fp32 scalar and can be differentiated once; `weights` says where there is anything: [B, T] each."""
    kept = trained(weights)
    drawn = targets.reshape(-1)[kept], how, of_kept(states, kept)
    loss, *found = _Surrogate.apply(*inputs(x, kept, head), head, *drawn, coefficients.reshape(-1)[kept])  # type: ignore[misc]
    return loss, said(kept, weights, tuple(found))


def token_logprobs(x: Tensor, head: Head, targets: Tensor, weights: Tensor, how: Processing = AS_IT_IS, states: Tensor | None = None) -> Said:
    """Of each target where `weights` is not 0, from the distribution that was sampled from; `states` [B, T, 1 + k] are of `how.edges`."""
    kept = trained(weights)
    found = _TokenLogprobs.apply(*inputs(x, kept, head), head, targets.reshape(-1)[kept], how, of_kept(states, kept))  # type: ignore[misc]
    return said(kept, weights, found)
