"""From logits to the distribution that a token is drawn from: for the engine that draws, and for losses that look at what was drawn.

The one idea: both use these lines, so a log-prob of the trainer's is one of the distribution that was really sampled from. First only the tokens that are
allowed, then the temperature, then the nucleus: the likeliest tokens that together have `top_p` (Holtzman et al. 2020).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e9  # the logit of what cannot be drawn: no probability, and finite, so that 0 times it is 0
# By how much a sum of probabilities differs between two programs, by the type that they multiply in: where a nucleus ends nearer to `top_p` than this,
# the other may end it elsewhere. bf16: logits of 10 have a rounding of 2⁻⁷ of them.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Edges:
    """A trie of allowed tokens (ptf.data.trie): those after state i are tokens[starts[i]:starts[i + 1]]."""

    starts: Tensor  # [states + 1] int64
    tokens: Tensor  # [edges] int64

    def to(self, device: torch.device) -> "Edges":
        return Edges(self.starts.to(device), self.tokens.to(device))


@dataclass(frozen=True)
class Processing:
    """What is done to logits before a token is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    edges: Edges | None = None  # None: every token is allowed


AS_IT_IS = Processing()


def restrict(logits: Tensor, states: Tensor, edges: Edges, first: int = 0) -> Tensor:
    """Logits [n, V] of the vocabulary from `first` on, in place. `states` [n, 1 + k] int64 (Trie.walked): tokens that do not follow their row's state, and
    up to k that are taken out of it, are never drawn."""
    begins = edges.starts[states[:, 0]]
    counts = edges.starts[states[:, 0] + 1] - begins
    rows = torch.repeat_interleave(torch.arange(len(states), device=logits.device), counts)
    into = torch.arange(len(rows), device=logits.device) - (counts.cumsum(0) - counts)[rows]
    columns = edges.tokens[begins[rows] + into] - first
    here = (columns >= 0) & (columns < logits.shape[1])
    rows, columns = rows[here], columns[here]
    kept = logits[rows, columns]
    logits.fill_(NEVER)[rows, columns] = kept
    rows, column = torch.nonzero((states[:, 1:] >= first) & (states[:, 1:] < first + logits.shape[1]), as_tuple=True)
    logits[rows, states[rows, column + 1] - first] = NEVER
    return logits


def nucleus(logprobs: Tensor, top_p: float | Tensor, drawn: Tensor | None = None, rounding: float = ROUNDING[torch.float32]) -> Tensor:
    """Log-probs [n, V], in place: those of the smallest set of likeliest tokens that has `top_p` (a number, or [n]) or more, and of the tokens that were
    `drawn` [n], if rounding alone may have brought them into another program's set; in all 1 again. Returns [n] by how much a log-prob would differ had
    the set ended elsewhere for `rounding`, of a sum of probabilities."""
    p = torch.as_tensor(top_p, dtype=logprobs.dtype, device=logprobs.device).expand(len(logprobs))[:, None]
    falling, order = logprobs.sort(-1, descending=True)
    mass = falling.double().exp().cumsum(-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    size, least, most = ((before < bound).sum(-1, keepdim=True).clamp(min=1) for bound in (p, p - rounding, p + rounding))
    size = torch.where(p >= 1, logprobs.shape[1], size)
    inside = torch.zeros_like(logprobs, dtype=torch.bool)
    inside.scatter_(-1, order, torch.arange(logprobs.shape[1], device=logprobs.device) < size)
    total = mass.gather(-1, size - 1)
    if drawn is not None:
        at = drawn[:, None]
        near = torch.zeros_like(before).scatter_(-1, order, before).gather(-1, at) < p + 3 * rounding
        there = inside.gather(-1, at)
        total = total + logprobs.gather(-1, at).double().exp() * (near & ~there)
        inside.scatter_(-1, at, near | there)
    total = torch.where(p >= 1, 1.0, total)
    logprobs.sub_(total.log().to(logprobs.dtype)).masked_fill_(~inside, NEVER)
    apart = torch.maximum(mass.gather(-1, most - 1), total).log() - torch.minimum(mass.gather(-1, least - 1), total).log()
    return torch.where(p >= 1, 0.0, apart).squeeze(-1).to(logprobs.dtype)
