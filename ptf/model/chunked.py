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

from ptf.model.custom_head import CustomHead
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


class GradientsInForward(Function):
    """A sum whose forward pass computes and saves its gradients by its first arguments: x, the head's weight and its
    bias."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        """Return the gradients, multiplied in place by the upstream gradient.

        A head's gradient is too large to copy (594 MiB for 151,936 × 1,024). Because the tensors are changed, a second
        backward raises.
        """
        found = (None if t is None else t.mul_(grads[0]) for t in ctx.saved_tensors)
        return *found, *[None] * (len(ctx.needs_input_grad) - 3)


class _Targets:
    """The targets [N] of the selected positions, and the distribution of a head that they are measured by."""

    def __init__(
        self,
        targets: Tensor,
        head: Head,
        selected: Tensor,
        processing: LogitsProcessing = NO_LOGITS_PROCESSING,
        trie_states: Tensor | None = None,
    ) -> None:
        self.targets, self.head, self.processing = targets.reshape(-1)[selected], head, processing
        self.trie_states = None if trie_states is None else trie_states.flatten(0, 1)[selected].long()
        here = self.targets - head.first
        # the column of each among this rank's part of the vocabulary
        self.at = here if head.group is None else here.clamp(0, len(head.weight) - 1)
        # 0 if a different rank has the target
        self.counts = torch.ones_like(here, dtype=torch.float32) if head.group is None else (here == self.at).float()

    def projection(self, x: Tensor, head: Head, needs: tuple[bool, ...] = (False, False, False)) -> Projection:
        """Return x [N, D] with the head applied; see Projection."""
        return Projection(x, head, chunks_of(len(x), head), self.processing, self.targets, self.trie_states, needs)

    def subtract(self, block: slice, values: Tensor) -> Tensor:
        """Subtract 1 at each target of `values` [n, V], in place."""
        return values.scatter_add_(1, self.at[block, None], -self.counts[block, None])

    def measure(
        self, projection: Projection, weights: Tensor | None = None, *, entropies: bool = True
    ) -> tuple[Tensor, ...]:
        """Return the targets' log-probs, and with `entropies` the entropies and the slacks, fp32 [N] each.

        With `weights` [N], add the gradients of −Σ weights · log-prob to the projection.
        """
        picked = torch.empty(len(projection.x), dtype=torch.float32, device=projection.x.device)
        entropy = torch.empty_like(picked)
        for block in projection.chunks:
            if weights is not None and not entropies and projection.fuses_loss:
                picked[block] = projection.cross_entropy(block, self.targets[block], weights[block])
                continue
            logprobs = projection.logprobs(block)
            picked[block] = logprobs.gather(1, self.at[block, None]).squeeze(1) * self.counts[block]
            if entropies:
                entropy[block] = projection.entropies(logprobs, leave_probabilities=weights is not None)
            elif weights is not None:
                projection.probabilities(logprobs, out=logprobs)
            if weights is not None:
                projection.accumulate(block, self.subtract(block, logprobs), weights[block])
        picked = summed(picked, self.head.group)
        return (picked, summed(entropy, self.head.group), projection.slack) if entropies else (picked,)


class _CrossEntropy(GradientsInForward):
    """−Σ weights · log-prob, or with `entropies` the policy-gradient surrogate −Σ weights · exp(logp − logp.detach()),
    which has the same gradient: that of the policy at ratio 1.

    Also returns what `_Targets.measure` does, which has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: _Targets,
        weights: Tensor,
        entropies: bool,
    ) -> tuple[Tensor, ...]:
        projection = targets.projection(x, targets.head, ctx.needs_input_grad[:3])
        wanted = weights if any(ctx.needs_input_grad) else None
        values = targets.measure(projection, wanted, entropies=entropies)
        ctx.save_for_backward(*projection.gradients())
        ctx.mark_non_differentiable(*values)
        if entropies:
            return -weights.sum(dtype=torch.float32), *values
        return (-(values[0] * weights)).sum(dtype=torch.float32), *values


class _TokenLogprobs(Function):
    """The log-prob of each target, and the entropy of each distribution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets) -> tuple[Tensor, ...]:
        picked, entropy, slack = targets.measure(targets.projection(x, targets.head))
        ctx.mark_non_differentiable(slack)
        ctx.save_for_backward(x, weight, bias, entropy)
        ctx.targets = targets
        # most losses do not use the entropy, whose gradient costs a buffer and three passes
        ctx.set_materialize_grads(False)
        return picked, entropy, slack

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # type: ignore[override]
        (x, weight, bias, entropy), targets = ctx.saved_tensors, ctx.targets
        head = replace(targets.head, weight=weight, bias=bias)
        projection = targets.projection(x, head, ctx.needs_input_grad[:3])
        of_logprobs, of_entropy = (-torch.zeros_like(entropy) if grad is None else -grad for grad in grads[:2])
        spare = None if grads[1] is None else projection.new_block()
        for block in projection.chunks:
            logprobs = projection.logprobs(block)
            p = projection.probabilities(logprobs, out=logprobs if spare is None else spare[: len(logprobs)])
            if spare is None:
                projection.accumulate(block, targets.subtract(block, p), of_logprobs[block])
                continue
            bent = logprobs.add_(entropy[block, None]).mul_(p).mul_(of_entropy[block, None])  # ∂H/∂z = −p (log p + H)
            bent += targets.subtract(block, p).mul_(of_logprobs[block, None])
            projection.accumulate(block, bent, torch.ones_like(entropy[block]))
        return *projection.gradients(), None


def trained_positions(weights: Tensor) -> Tensor:
    """Return the flat indices of the positions whose weight is not 0."""
    return weights.reshape(-1).nonzero().squeeze(1)


def rows(x: Tensor, selected: Tensor) -> Tensor:
    """Return x [.., D] at the selected positions: [N, D]."""
    return x.flatten(0, -2).index_select(0, selected)


def function_inputs(x: Tensor, selected: Tensor, head: Head) -> list[Tensor | None]:
    """Return the tensors that may need a gradient: x [N, D] at the selected positions, the head's weight and its bias.

    They are detached under `no_grad`, because the forward pass of an autograd Function cannot detect it.
    """
    tensors = [rows(x, selected), head.weight, head.bias]
    return tensors if torch.is_grad_enabled() else [t if t is None else t.detach() for t in tensors]


def cross_entropy(x: Tensor, head: Head, targets: Tensor, weights: Tensor, selected: Tensor | None = None) -> Tensor:
    """Return Σ weights · (−log p(target)), an fp32 scalar that can be differentiated once.

    `x` is [B, T, D]; `targets` and `weights` are [B, T]. `selected` [N] are the flat indices of the positions whose
    weight is not 0; without it `nonzero()` finds them, for which the host waits for the GPU.
    """
    selected = trained_positions(weights) if selected is None else selected
    which, weights = _Targets(targets, head, selected), weights.reshape(-1)[selected]
    return _CrossEntropy.apply(*function_inputs(x, selected, head), which, weights, False)[0]


def next_token_loss(x: Tensor, head: Head | CustomHead, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a model that is trained on text, and each document's part of it.

    The loss is the cross-entropy over the vocabulary, and the parts are [documents], without gradient; with a head of
    the user's own it is that head's loss, and the parts are None.
    """
    if not isinstance(head, Head):
        return head.loss(x, batch), None
    selected = batch.trained_positions
    which, weights = _Targets(batch.targets, head, selected), batch.loss_weights.reshape(-1)[selected]
    loss, logprobs = _CrossEntropy.apply(*function_inputs(x, selected, head), which, weights, False)
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
    which, coefficients = _Targets(targets, head, selected, processing, trie_states), coefficients.reshape(-1)[selected]
    loss, *values = _CrossEntropy.apply(*function_inputs(x, selected, head), which, coefficients, True)
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
    which = _Targets(targets, head, selected, processing, trie_states)
    return scatter(selected, weights, _TokenLogprobs.apply(*function_inputs(x, selected, head), which))
