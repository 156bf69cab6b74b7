"""Losses over hidden states that never hold [B, T, V]: positions that are not trained are dropped before the head, the rest goes through it
in chunks whose fp32 logits take about 64 MiB. Every function returns a sum or per-token values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK_BYTES = 64 << 20


def _chunks(n: int, vocab: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocab))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _CrossEntropy(Function):
    """The gradient is taken in the forward pass (three GEMMs, nothing recomputed) and the head's is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        needs_x, needs_head = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if needs_x else None
        dhead = torch.zeros(head.shape, dtype=torch.float32, device=x.device) if needs_head else None
        for part in _chunks(len(x), len(head)):
            logits = (x[part] @ head.t()).float()  # [n, V]
            lse = logits.logsumexp(-1)
            picked = logits.gather(1, targets[part, None]).squeeze(1)
            total += ((lse - picked) * weights[part]).sum()
            if dx is None and dhead is None:
                continue
            grad = logits.sub_(lse[:, None]).exp_()  # softmax
            grad.scatter_add_(1, targets[part, None], torch.full_like(lse, -1.0)[:, None])
            grad = grad.mul_(weights[part, None]).to(x.dtype)
            if dx is not None:
                dx[part] = grad @ head
            if dhead is not None:
                dhead += grad.t() @ x[part]
        ctx.save_for_backward(dx, None if dhead is None else dhead.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (upstream,) = grads
        dx, dhead = ctx.saved_tensors
        scale = lambda t: None if t is None else (t * upstream.to(torch.promote_types(t.dtype, upstream.dtype))).to(t.dtype)  # noqa: E731
        return scale(dx), scale(dhead), None, None


class _TokenLogprobs(Function):
    """Log-prob of each target and entropy of each distribution; the logits are made again in the backward pass. Entropy carries no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        for part in _chunks(len(x), len(head)):
            logits = (x[part] @ head.t()).float() / temperature
            normalisers[part] = lse = logits.logsumexp(-1)
            logits -= lse[:, None]
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(x, head, targets, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        upstream = grads[0]
        x, head, targets, normalisers = ctx.saved_tensors
        needs_x, needs_head = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if needs_x else None
        dhead = torch.zeros(head.shape, dtype=torch.float32, device=x.device) if needs_head else None
        for part in _chunks(len(x), len(head)):
            grad = ((x[part] @ head.t()).float() / ctx.temperature - normalisers[part, None]).exp_().neg_()  # -softmax
            grad.scatter_add_(1, targets[part, None], torch.ones_like(normalisers[part])[:, None])
            grad = grad.mul_(upstream[part, None] / ctx.temperature).to(x.dtype)
            if dx is not None:
                dx[part] = grad @ head
            if dhead is not None:
                dhead += grad.t() @ x[part]
        return dx, None if dhead is None else dhead.to(head.dtype), None, None


def _trained(weights: Tensor) -> Tensor:
    return weights.reshape(-1).nonzero().squeeze(1)


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · (−log p(target)), fp32 scalar. x [B, T, D], head [V, D], targets and weights [B, T]."""
    kept = _trained(weights)
    return _CrossEntropy.apply(x.flatten(0, 1)[kept], head, targets.reshape(-1)[kept], weights.reshape(-1)[kept])  # type: ignore[return-value]


def token_logprobs(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (no gradient) at `temperature`, where `weights` is not 0; 0 elsewhere. Two of [B, T], fp32."""
    kept = _trained(weights)
    logprobs, entropy = _TokenLogprobs.apply(x.flatten(0, 1)[kept], head, targets.reshape(-1)[kept], temperature)  # type: ignore[misc]
    empty = torch.zeros(weights.numel(), dtype=torch.float32, device=x.device)
    return (empty.index_put((kept,), logprobs).view_as(weights), empty.index_put((kept,), entropy).view_as(weights))
