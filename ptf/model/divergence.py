"""How far a student's predictions are from a teacher's, over the whole vocabulary or over the teacher's likeliest
tokens and the rest; computed chunk by chunk, like the losses of chunked.py.

    forward   KL(t ‖ s) = Σ t (log t − log s)
              Hinton et al. 2015, section 2 (their factor T² is left out)
    reverse   KL(s ‖ t) = Σ s (log s − log t)
              Gu et al. 2024, eq. 2
    js        β KL(t ‖ m) + (1 − β) KL(s ‖ m),  m = β t + (1 − β) s
              generalised Jensen–Shannon (Agarwal et al. 2024, eq. 1)

The gradient of D(s) = Σ d(sᵥ) with respect to the logits is sᵥ (d′(sᵥ) − Σ s d′), whatever d is: it takes one mean
over the vocabulary, and everything else happens where the logits are. With the likeliest k tokens, all others are one
further outcome, so that D is 0 only where those k and their sum are right, and is never larger than over the whole
vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ptf.model.chunked import WithGradients, needed, rows, tiles_of, trained_positions
from ptf.model.head import Head
from ptf.model.loss_workspace import FLOOR, LossWorkspace, Tiles, columns_of, summed
from ptf.model.sampling import LogitsProcessing

# tensors as large as a chunk's logits, with a teacher's whole distribution: log-probs and probabilities of both, and
# the student's gradient in bf16
BUFFERS = 5


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence D, and the temperature of the distributions that it compares; 0 < beta < 1."""

    form: Literal["forward", "reverse", "js"] = "forward"
    beta: float = 0.5
    temperature: float = 1.0


FORWARD = Divergence()


def compare(log_s: Tensor, s: Tensor, log_t: Tensor, t: Tensor, how: Divergence, head: Head | None) -> Tensor:
    """Return D of each position [n], from log-probs and probabilities of outcomes, [n, outcomes] each.

    `log_s` becomes the gradient with respect to the student's logits; `log_t` is overwritten. Each rank of the group of
    `head` holds a part of the outcomes.
    """
    group, beta = head.group if head else None, how.beta
    if how.form == "forward":
        values = log_t.sub_(log_s).mul_(t).sum(-1)
        torch.sub(s, t, out=log_s)
        return summed(values, group)
    if how.form == "reverse":
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

    def __init__(self, x: Tensor, head: Head, tiles: Tiles, temperature: float) -> None:
        self.work = LossWorkspace(x, head, tiles, LogitsProcessing(temperature))
        self.s, self.t = self.work.new_block(), self.work.new_block()

    def compare(self, block: slice, log_s: Tensor, student: LossWorkspace, how: Divergence) -> Tensor:
        """Return D of the block's positions; `log_s` becomes the gradient."""
        n, real = len(log_s), slice(student.head.real)
        log_t = self.work.logprobs(block)
        t = self.work.probabilities(log_t, out=self.t[:n])
        # student and teacher may be padded to different widths
        out = self.s[:n] if self.s.shape[1] == log_s.shape[1] else torch.empty_like(log_s)
        s = student.probabilities(log_s, out=out)
        values = compare(log_s[:, real], s[:, real], log_t[:, real], t[:, real], how, student.head)
        log_s[:, real.stop :] = 0
        return values


class _Top:
    """A teacher's likeliest tokens and the sum of the others."""

    def __init__(self, ids: Tensor, logprobs: Tensor, head: Head) -> None:
        self.at, self.counts = columns_of(ids.long(), head)
        self.logprobs = logprobs

    def compare(self, block: slice, log_s: Tensor, student: LossWorkspace, how: Divergence) -> Tensor:
        at, counts, log_t, group = self.at[block], self.counts[block], self.logprobs[block], student.head.group
        known = summed(log_s.gather(1, at) * counts, group)  # [n, k]
        s = student.probabilities(log_s, out=log_s)
        rest = _rest(s, at, counts, group)
        log_outcomes = torch.cat([known, rest.log()], -1)
        values = compare(log_outcomes, log_outcomes.exp(), log_t.clone(), log_t.exp(), how, None)
        s.mul_(log_outcomes[:, -1:] / rest).scatter_add_(1, at, log_outcomes[:, :-1] * counts)
        return values


def _rest(p: Tensor, at: Tensor, counts: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the probability of all tokens but those at `at`, [n, 1]; theirs become 0 in `p`.

    It is computed as a sum, because 1 minus their probabilities would lose most of its digits.
    """
    p.scatter_add_(1, at, -counts * p.gather(1, at))
    return summed(p.sum(-1, keepdim=True), group).clamp_(min=math.exp(FLOOR))


def _summed_divergence(
    x: Tensor, head: Head, teacher: _Whole | _Top, tiles: Tiles, weights: Tensor, how: Divergence, selected: Tensor
) -> Tensor:
    """Return Σ weights · D over the selected positions, for x [B, T, D] and weights [B, T]."""
    x, weights = rows(x, selected), weights.reshape(-1)[selected]
    tensors = x, head.weight, head.bias
    needs = needed(*tensors)
    with torch.no_grad():
        student = LossWorkspace(x, head, tiles, LogitsProcessing(how.temperature), needs=needs)
        values = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for block in tiles:
            log_s = student.logprobs(block)
            values[block] = teacher.compare(block, log_s, student, how)
            if any(needs):
                student.accumulate(block, log_s, weights[block])
        total, gradients = (values * weights).sum(dtype=torch.float32), student.gradients()
    return cast("Tensor", WithGradients.apply(total, gradients, *tensors))


def divergence(
    x: Tensor,
    head: Head,
    x_teacher: Tensor,
    head_teacher: Head,
    weights: Tensor,
    how: Divergence = FORWARD,
    selected: Tensor | None = None,
) -> Tensor:
    """Return Σ weights · D(student, teacher) over the full distributions, an fp32 scalar.

    `x` is [B, T, D], `x_teacher` [B, T, D'], `weights` [B, T]. The result can be differentiated once, by the student's
    x and head.
    Raise ValueError unless both heads hold the same rows of the same vocabulary; their padding may differ.
    """
    held = [(h.vocab, h.vocab_start, h.real, h.group) for h in (head, head_teacher)]
    if held[0] != held[1]:
        raise ValueError(
            "student and teacher must hold the same rows of one vocabulary; (vocab, first, rows, group) "
            f"are {held[0]} and {held[1]}"
        )
    selected = trained_positions(weights) if selected is None else selected
    tiles = tiles_of(len(selected), head, head_teacher, buffers=BUFFERS)
    with torch.no_grad():
        teacher = _Whole(rows(x_teacher, selected), head_teacher, tiles, how.temperature)
    return _summed_divergence(x, head, teacher, tiles, weights, how, selected)


def divergence_of_top(
    x: Tensor,
    head: Head,
    ids: Tensor,
    logprobs: Tensor,
    weights: Tensor,
    how: Divergence = FORWARD,
    selected: Tensor | None = None,
) -> Tensor:
    """Return the divergence from what `top_logprobs` gave for a teacher at the same temperature.

    `ids` is [B, T, k], `logprobs` [B, T, k + 1]; the rest is as in `divergence`.
    """
    selected = trained_positions(weights) if selected is None else selected
    top = _Top(rows(ids, selected), rows(logprobs, selected), head)
    return _summed_divergence(x, head, top, tiles_of(len(selected), head), weights, how, selected)


@torch.no_grad()
def top_logprobs(
    x: Tensor, head: Head, k: int, weights: Tensor, temperature: float = 1.0, selected: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens and their log-probs at `temperature`.

    The ids are [B, T, k] int32, the likeliest first; the log-probs are [B, T, k + 1] fp32, the last being that of all
    other tokens together. Both are 0 where `weights` is 0. Raise ValueError if the vocabulary has no more than k
    tokens.
    """
    if k >= head.vocab:
        raise ValueError(
            f"the {k} likeliest of {head.vocab} tokens were asked for; k must be smaller than the vocabulary"
        )
    selected = trained_positions(weights) if selected is None else selected
    tiles = tiles_of(len(selected), head)
    work = LossWorkspace(rows(x, selected), head, tiles, LogitsProcessing(temperature))
    ids = torch.zeros(weights.numel(), k, dtype=torch.int32, device=x.device)
    top = torch.zeros(weights.numel(), k + 1, device=x.device)
    for block in tiles:
        logprobs = work.logprobs(block)
        values, best = logprobs.topk(min(k, len(head.weight)), -1)
        best += head.vocab_start
        if head.group is not None:
            values, best = (_gathered(mine, k, fill, head) for mine, fill in ((values, -math.inf), (best, 0)))
            values, columns = values.topk(k, -1)
            best = best.gather(1, columns)
        rest = _rest(work.probabilities(logprobs, out=logprobs), *columns_of(best, head), head.group)
        ids[selected[block]] = best.int()
        top[selected[block]] = torch.cat([values, rest.log()], -1)
    return ids.view(*weights.shape, k), top.view(*weights.shape, k + 1)


def _gathered(here: Tensor, k: int, fill: float, head: Head) -> Tensor:
    """Return the columns of all ranks of the group side by side, `k` of each, padded with `fill`."""
    mine = here.new_full((len(here), k), fill)
    mine[:, : here.shape[1]] = here
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(head.group))]
    dist.all_gather(parts, mine, group=head.group)
    return torch.cat(parts, -1)
