"""A response that an engine is generating: its tokens so far, and what its next ones depend on beside the model.

The native engine draws them by inverse transform of each request's own random numbers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ptf.data.trajectory import Generation
from ptf.data.trie import Trie, TrieCursor
from ptf.model.sampling import Edges, nucleus, restrict
from ptf.rl.engines.protocol import Progress, Request, edges_of


@dataclass(eq=False)
class ResponseInProgress:
    """One response that is being generated."""

    number: int  # of its request, as the engine numbers them
    request: Request
    streamed: bool = False
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @functools.cached_property
    def draws(self) -> list[float]:
        """The uniform random numbers in [0, 1) of the longest response's tokens, from the request's seed."""
        generator, first = torch.Generator().manual_seed(self.request.seed), self.request.offset
        count = first + self.request.sampling.max_new_tokens
        return torch.rand(count, dtype=torch.float64, generator=generator)[first:].tolist()

    @functools.cached_property
    def walk(self) -> TrieCursor | None:
        """The place in the request's trie after the tokens so far; None without a trie."""
        trie = self.request.sampling.trie
        return None if trie is None else TrieCursor(trie)

    @property
    def tokens(self) -> np.ndarray:
        """Return the context and what was sampled, [n] int32."""
        return np.concatenate([self.request.context, np.array(self.sampled, np.int32)])

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest tokens are taken."""
        return self.request.sampling.temperature == 0

    @property
    def finished(self) -> bool:
        """Return whether the last token ends the response."""
        return bool(self.sampled) and self.sampled[-1] in self.request.sampling.stop

    @property
    def ended(self) -> bool:
        """Return whether no further token is sampled."""
        return self.finished or len(self.sampled) == self.request.sampling.max_new_tokens

    def progress(self, version: int) -> Progress:
        """Return what the last token adds to the response."""
        ids, logprobs = np.array(self.sampled[-1:], np.int32), np.array(self.logprobs[-1:], np.float32)
        return Progress(self.number, ids, logprobs, self.generation(version) if self.ended else None)

    def generation(self, version: int) -> Generation:
        """Return the whole response."""
        return Generation(
            self.request.context,
            np.array(self.sampled, np.int32),
            np.array(self.logprobs, np.float32),
            np.full(len(self.sampled), version, np.int32),
            self.finished,
        )


def distinct_contexts(requests: Sequence[Request]) -> tuple[list[np.ndarray], list[int]]:
    """Return the different contexts of requests, and the index of each request's context among them."""
    contexts = {request.context.tobytes(): request.context for request in requests}
    index = {key: i for i, key in enumerate(contexts)}
    return list(contexts.values()), [index[request.context.tobytes()] for request in requests]


@functools.lru_cache(maxsize=8)
def _edges(trie: Trie, device: torch.device) -> Edges:
    return edges_of(trie).to(device)


def sample(responses: Sequence[ResponseInProgress], logits: Tensor) -> Tensor:
    """Append a token to each response, drawn from its row of the logits, [n, V]; return the tokens, [n].

    What a trie does not allow is set in place.
    """
    device, samplings = logits.device, [response.request.sampling for response in responses]
    for trie in {sampling.trie for sampling in samplings} - {None}:
        rows = [row for row, sampling in enumerate(samplings) if sampling.trie is trie]
        states = torch.tensor([walk.place() for row in rows if (walk := responses[row].walk)], device=device)
        logits[rows] = restrict(logits[rows], states, _edges(trie, device))
    temperature = torch.tensor([s.temperature for s in samplings], device=device)
    top_p = torch.tensor([s.top_p if s.temperature else 1.0 for s in samplings], device=device)  # greedy: 1
    draws = torch.tensor([r.draws[len(r.sampled)] for r in responses], dtype=torch.float64, device=device)
    tokens, chosen = draw(logits, temperature, top_p, draws)
    for response, token, logprob in zip(responses, tokens.tolist(), chosen.tolist(), strict=True):
        response.sampled.append(token)
        response.logprobs.append(logprob)
        if response.walk is not None:
            response.walk.follow(token)
    return tokens


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
