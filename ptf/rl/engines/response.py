"""A response that an engine is generating: its tokens so far, and what its next ones depend on beside the model."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ptf.data.trajectory import Generation
from ptf.data.trie import TrieCursor
from ptf.rl.engines.protocol import Request


@dataclass(eq=False)
class ResponseInProgress:
    """One response that is being generated."""

    number: int  # of its request, as the engine numbers them
    request: Request
    streamed: bool = False
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @cached_property
    def draws(self) -> list[float]:
        """The uniform random numbers in [0, 1) of the longest response's tokens, from the request's seed."""
        generator, first = torch.Generator().manual_seed(self.request.seed), self.request.offset
        count = first + self.request.sampling.max_new_tokens
        return torch.rand(count, dtype=torch.float64, generator=generator)[first:].tolist()

    @cached_property
    def walk(self) -> TrieCursor | None:
        """The place in the request's trie after the tokens so far; None without a trie."""
        trie = self.request.sampling.trie
        return None if trie is None else TrieCursor(trie)

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

    def generation(self, version: int) -> Generation:
        """Return the whole response."""
        return Generation(
            self.request.context,
            np.array(self.sampled, np.int32),
            np.array(self.logprobs, np.float32),
            np.full(len(self.sampled), version, np.int32),
            self.finished,
        )
