"""How far a student's predictions are from a teacher's, over the whole vocabulary or over the teacher's likeliest tokens and the rest; chunk by
chunk, like the losses of chunked.py.

    forward   KL(t ‖ s) = Σ t (log t − log s)                       Hinton et al. 2015, section 2 (their factor T² is left out)
    reverse   KL(s ‖ t) = Σ s (log s − log t)                       Gu et al. 2024, eq. 2
    js        β KL(t ‖ m) + (1 − β) KL(s ‖ m),  m = β t + (1 − β) s  generalised Jensen–Shannon (Agarwal et al. 2024, eq. 1)

The one idea: by the logits, the gradient of a D(s) = Σ d(sᵥ) is sᵥ (d′(sᵥ) − Σ s d′), whatever d is: one mean over the vocabulary, and everything
else happens where the logits are. Of the likeliest k tokens, the others are one outcome more, so that D is 0 only where those k and their sum
are right, and never larger than over the whole vocabulary.
"""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ptf.model.chunked import chunks_of, inputs, scaled, trained
from ptf.model.head import Head
from ptf.model.projection import FLOOR, Projection, summed
from ptf.model.sampling import Processing

Form = Literal["forward", "reverse", "js"]


def compare(log_s: Tensor, s: Tensor, log_t: Tensor, t: Tensor, form: Form, beta: float, head: Head | None) -> Tensor:
    """D of each position [n], from log-probs and probabilities of outcomes, [n, outcomes] each; `log_s` becomes its gradient by the student's
    logits, `log_t` is used up. `head`: whose group's ranks hold other outcomes."""
    group = head.group if head else None
    if form == "forward":
        values = log_t.sub_(log_s).mul_(t).sum(-1)
        torch.sub(s, t, out=log_s)
        return summed(values, group)
    if form == "reverse":
        values = summed(torch.linalg.vecdot(s, log_s.sub_(log_t)), group)
        log_s.sub_(values[:, None]).mul_(s)
        return values
    middle = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    theirs = log_t.sub_(middle).mul_(t).sum(-1)
    ours = summed(torch.linalg.vecdot(s, log_s.sub_(middle)), group)
    log_s.sub_(ours[:, None]).mul_(s).mul_(1 - beta)
    return summed(theirs, group).mul_(beta).add_(ours, alpha=1 - beta)


class _Whole:
    """A teacher's distribution over the whole vocabulary."""

    def __init__(self, x: Tensor, head: Head, chunks: list[slice], temperature: float) -> None:
        self.projection = Projection(x, head, chunks, Processing(temperature))
        self.s, self.t = torch.empty_like(self.projection.wide), torch.empty_like(self.projection.wide)

    def compare(self, chunk: slice, log_s: Tensor, student: Projection, form: Form, beta: float) -> Tensor:
        """D of the chunk's positions; `log_s` becomes the gradient."""
        n, real = len(log_s), slice(student.head.real)
        log_t = self.projection.logprobs(chunk)
        t = self.projection.probabilities(log_t, out=self.t[:n])
        s = student.probabilities(log_s, out=_like(self.s[:n], log_s))
        values = compare(log_s[:, real], s[:, real], log_t[:, real], t[:, real], form, beta, student.head)
        log_s[:, real.stop :] = 0
        return values


def _like(spare: Tensor, wanted: Tensor) -> Tensor:
    """The buffer, if it fits: student and teacher may be filled up to different widths."""
    return spare if spare.shape == wanted.shape else torch.empty_like(wanted)


class _Top:
    """A teacher's likeliest tokens."""

    def __init__(self, ids: Tensor, logprobs: Tensor, head: Head) -> None:
        self.at, self.counts = _here(ids, head)
        self.logprobs = logprobs

    def compare(self, chunk: slice, log_s: Tensor, student: Projection, form: Form, beta: float) -> Tensor:
        at, counts, log_t, group = self.at[chunk], self.counts[chunk], self.logprobs[chunk], student.head.group
        known = summed(log_s.gather(1, at) * counts, group)  # [n, k]
        s = student.probabilities(log_s, out=log_s)
        rest = _rest(s, at, counts, group)
        log_outcomes = torch.cat([known, rest.log()], -1)
        values = compare(log_outcomes, log_outcomes.exp(), log_t.clone(), log_t.exp(), form, beta, None)
        s.mul_(log_outcomes[:, -1:] / rest).scatter_add_(1, at, log_outcomes[:, :-1] * counts)
        return values


def _here(ids: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Which rows they are on this rank, and 1; or any row, and 0, where another rank has them. [n, k] each."""
    here = ids.long() - head.first
    at = here.clamp(0, len(head.weight) - 1)
    return at, (here == at).float()


def _rest(p: Tensor, at: Tensor, counts: Tensor, group: ProcessGroup | None) -> Tensor:
    """What other tokens than those have, [n, 1], of probabilities in which those become 0: a sum, for of 1 minus theirs little would be left."""
    p.scatter_add_(1, at, -counts * p.gather(1, at))
    return summed(p.sum(-1, keepdim=True), group).clamp_(min=math.exp(FLOOR))


class _Divergence(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, teacher: _Whole | _Top, chunks: list[slice], weights: Tensor,
        temperature: float, form: Form, beta: float,
    ) -> Tensor:  # fmt: skip
        student = Projection(x, head, chunks, Processing(temperature), needs=ctx.needs_input_grad[:3])
        values = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for chunk in chunks:
            log_s = student.logprobs(chunk)
            values[chunk] = teacher.compare(chunk, log_s, student, form, beta)
            if any(ctx.needs_input_grad):
                student.pull(chunk, log_s, weights[chunk])
        ctx.save_for_backward(*student.gradients())
        return (values * weights).sum(dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return *scaled(ctx, grads[0]), *[None] * 7


def divergence(
    x: Tensor, head: Head, x_teacher: Tensor, head_teacher: Head, weights: Tensor, *, form: Form = "forward", beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """Σ weights · D(student, teacher) of the full distributions, both at `temperature`, fp32 scalar. x [B, T, D], x_teacher [B, T, D'], weights
    [B, T]; 0 < beta < 1. It can be differentiated once, by the student's x and head.
    Raises ValueError unless both heads hold the same rows of the same vocabulary; their padding may differ."""
    rows = [(h.vocab, h.first, h.real, h.group) for h in (head, head_teacher)]
    if rows[0] != rows[1]:
        raise ValueError(f"student and teacher must hold the same rows of one vocabulary; (vocab, first, rows, group) are {rows[0]} and {rows[1]}")
    kept = trained(weights)
    chunks = chunks_of(len(kept), head, head_teacher)
    with torch.no_grad():
        teacher = _Whole(x_teacher.flatten(0, -2).index_select(0, kept), head_teacher, chunks, temperature)
    return _Divergence.apply(*inputs(x, kept, head), head, teacher, chunks, weights.reshape(-1)[kept], temperature, form, beta)  # type: ignore[return-value]


def divergence_of_top(
    x: Tensor, head: Head, ids: Tensor, logprobs: Tensor, weights: Tensor, *, form: Form = "forward", beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """The same beside what `top_logprobs` gave for a teacher at that temperature: ids [B, T, k], logprobs [B, T, k + 1]."""
    kept = trained(weights)
    chunks = chunks_of(len(kept), head)
    teacher = _Top(ids.flatten(0, -2).index_select(0, kept), logprobs.flatten(0, -2).index_select(0, kept), head)
    return _Divergence.apply(*inputs(x, kept, head), head, teacher, chunks, weights.reshape(-1)[kept], temperature, form, beta)  # type: ignore[return-value]


@torch.no_grad()
def top_logprobs(x: Tensor, head: Head, k: int, weights: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, the likeliest first, [B, T, k] int32; their log-probs at `temperature`, and that of all others together, [B, T, k + 1]
    fp32. Where `weights` is 0 both are. Raises ValueError if the vocabulary has no more than k."""
    if k >= head.vocab:
        raise ValueError(f"of {head.vocab} tokens, {k} are not a part")
    kept = trained(weights)
    chunks = chunks_of(len(kept), head)
    projection = Projection(x.flatten(0, -2).index_select(0, kept), head, chunks, Processing(temperature))
    ids, found = torch.zeros(weights.numel(), k, dtype=torch.int32, device=x.device), torch.zeros(weights.numel(), k + 1, device=x.device)
    for chunk in chunks:
        logprobs = projection.logprobs(chunk)
        values, best = logprobs.topk(min(k, len(head.weight)), -1)
        best += head.first
        if head.group is not None:
            values, best = (_gathered(mine, k, fill, head) for mine, fill in ((values, -math.inf), (best, 0)))
            values, places = values.topk(k, -1)
            best = best.gather(1, places)
        rest = _rest(projection.probabilities(logprobs, out=logprobs), *_here(best, head), head.group)
        ids[kept[chunk]], found[kept[chunk]] = best.int(), torch.cat([values, rest.log()], -1)
    return ids.view(*weights.shape, k), found.view(*weights.shape, k + 1)


def _gathered(found: Tensor, k: int, fill: float, head: Head) -> Tensor:
    """The columns of all ranks of the group side by side, `k` of each, filled up."""
    mine = found.new_full((len(found), k), fill)
    mine[:, : found.shape[1]] = found
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(head.group))]
    dist.all_gather(parts, mine, group=head.group)
    return torch.cat(parts, -1)
