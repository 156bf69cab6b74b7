"""From logits to the distribution that tokens are sampled from, for the engine that samples them and for the losses
over sampled tokens.

The trainer and the native engine call the same functions, so the trainer's log-probs are those of the distribution
that was sampled from, except for rounding (in bf16 the engine rounds logits, and the trainer on some devices does not);
vLLM has code of its own for it. First, tokens that are not allowed are excluded; then the
temperature is applied; then the distribution is restricted to the nucleus, the most likely tokens that together have
probability `top_p` (Holtzman et al. 2020).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e9  # logit of a token that cannot be drawn: its probability is 0, and being finite, 0 · NEVER is 0, not NaN
# Largest difference of a sum of probabilities between two programs, by the dtype of their products. If a nucleus ends
# nearer to `top_p` than this, the other program may end it at a different token. bf16 rounds logits by up to 2⁻⁸ of
# their size.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Edges:
    """A trie of allowed tokens (ptf.data.trie): tokens[starts[i]:starts[i + 1]] are allowed after state i."""

    starts: Tensor  # [states + 1] int64
    tokens: Tensor  # [edges] int64
    most: int  # largest number of edges of a state

    @classmethod
    def of(cls, starts: Tensor, tokens: Tensor) -> "Edges":
        """Return the edges of these tensors, which are on the host."""
        return cls(starts, tokens, int(starts.diff().max()) if len(starts) > 1 else 0)

    def to(self, device: torch.device) -> "Edges":
        """Return the trie on a device."""
        return Edges(self.starts.to(device), self.tokens.to(device), self.most)


@dataclass(frozen=True)
class LogitsProcessing:
    """Operations on the logits before a token is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    edges: Edges | None = None  # None: every token is allowed


NO_LOGITS_PROCESSING = LogitsProcessing()


def restrict(logits: Tensor, trie_states: Tensor, edges: Edges, first: int = 0) -> Tensor:
    """Set the logits of tokens that are not allowed to `NEVER`, in place, and return them.

    `logits` [n, V] belong to the tokens from id `first` on. Each row of `trie_states` [n, 1 + k] int64 (Trie.walked)
    has the row's state in the trie, and up to k allowed tokens that are excluded. The host does not wait for a GPU.
    """
    starts, ends = edges.starts[trie_states[:, :1]], edges.starts[trie_states[:, :1] + 1]
    edge = starts + torch.arange(edges.most, device=logits.device)  # [n, most]: those of the row, and others behind
    allowed = edges.tokens[edge.clamp(max=len(edges.tokens) - 1)] - first
    size = logits.shape[1]
    kept = torch.zeros(len(logits), size + 1, dtype=torch.bool, device=logits.device)  # the last one is for no token
    kept.scatter_(1, torch.where((edge < ends) & (allowed >= 0) & (allowed < size), allowed, size), True)
    excluded = trie_states[:, 1:] - first
    kept.scatter_(1, torch.where((excluded >= 0) & (excluded < size), excluded, size), False)
    return logits.masked_fill_(~kept[:, :size], NEVER)


def nucleus(
    logprobs: Tensor, top_p: float | Tensor, drawn: Tensor | None = None, rounding: float = ROUNDING[torch.float32]
) -> Tensor:
    """Restrict log-probs [n, V] to the nucleus of each row, in place, and return the slack of each row [n].

    The nucleus is the smallest set of most likely tokens whose probability is at least `top_p` (a number, or [n]); its
    probabilities are normalised to 1. The token that was `drawn` [n] is added if it may have been in the sampling
    program's nucleus because of rounding. The slack is the largest change of a log-prob if sums of probabilities were
    wrong by `rounding`, so that the nucleus ended at a different token.
    """
    p = torch.as_tensor(top_p, dtype=logprobs.dtype, device=logprobs.device).expand(len(logprobs))[:, None]
    falling, order = logprobs.sort(-1, descending=True)
    mass = falling.double().exp().cumsum(-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    size, least, most = (
        (before < bound).sum(-1, keepdim=True).clamp(min=1) for bound in (p, p - rounding, p + rounding)
    )
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
    slack = (
        torch.maximum(mass.gather(-1, most - 1), total).log() - torch.minimum(mass.gather(-1, least - 1), total).log()
    )
    return torch.where(p >= 1, 0.0, slack).squeeze(-1).to(logprobs.dtype)
