"""How the native engine draws tokens: by inverse transform of each request's own random numbers."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ptf.data.trie import Trie
from ptf.model.sampling import Edges, nucleus, restrict
from ptf.rl.engines.protocol import edges_of
from ptf.rl.engines.response import ResponseInProgress


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
