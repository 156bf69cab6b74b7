"""How the native engine draws tokens: by inverse transform of each request's own random numbers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.data.trie import TrieCursor
from ptf.model.sampling import nucleus, restrict
from ptf.rl.engines.protocol import Request, edges_of


def random_numbers(request: Request) -> Tensor:
    """Return the uniform random numbers in [0, 1) of a request's tokens, float64 [longest response], from its seed."""
    generator, first = torch.Generator().manual_seed(request.seed), request.offset
    return torch.rand(first + request.sampling.max_new_tokens, dtype=torch.float64, generator=generator)[first:]


def nucleus_size(request: Request) -> float:
    """Return the probability of the tokens that a request is sampled from; 1 if it is greedy."""
    return request.sampling.top_p if request.sampling.temperature else 1.0


class TrieStates:
    """The position of each of n requests in its trie, if it has one, after the tokens that it has."""

    def __init__(
        self, requests: Sequence[Request], device: torch.device, sampled: Sequence[Sequence[int]] = ()
    ) -> None:
        self.tries = [r.sampling.trie for r in requests]
        self.edges = {trie: edges_of(trie).to(device) for trie in self.tries if trie is not None}
        self.walks = [None if trie is None else TrieCursor(trie) for trie in self.tries]
        for walk, tokens in zip(self.walks, sampled, strict=False):
            if walk is not None:
                for token in tokens:
                    walk.follow(token)

    def restrict(self, logits: Tensor, live: np.ndarray) -> Tensor:
        """Restrict the logits, [n, V], of the live requests to the allowed tokens, in place."""
        for trie, edges in self.edges.items():
            rows = [i for i, request in enumerate(live) if self.tries[request] is trie]
            if rows:
                states = torch.tensor([self.walks[live[i]].place() for i in rows], device=logits.device)
                logits[rows] = restrict(logits[rows], states, edges)
        return logits

    def follow(self, live: np.ndarray, tokens: Tensor) -> None:
        """Move each live request along its token."""
        if self.edges:
            for request, token in zip(live, tokens.tolist(), strict=True):
                if (walk := self.walks[request]) is not None:
                    walk.follow(token)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of logits, [n, V], by inverse transform of `draws` in [0, 1).

    Temperature 0 takes the likeliest token. Returns tokens [n] and their log-probs [n].
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    if (top_p < 1).any():
        nucleus(logprobs, top_p)
    total = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = (
        torch.searchsorted(total, (draws * total[:, -1])[:, None], right=True)
        .squeeze(1)
        .clamp_(max=logits.shape[1] - 1)
    )
    tokens = torch.where(greedy, logits.argmax(-1), drawn) if greedy.any() else drawn
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
