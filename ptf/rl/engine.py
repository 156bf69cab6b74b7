"""What generates: the `RolloutEngine` protocol, one request, and the knobs of sampling.

The one idea: an engine serves one request at a time from many callers and batches them itself; it knows the version of its weights
and stamps it on every token.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ptf.data.trajectory import Call
from ptf.data.trie import Trie
from ptf.model.sampling import Edges
from ptf.rl.sync import Buckets, Manifest, Receipt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer is drawn."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    stop: tuple[int, ...]  # ids that end the answer; the one that did is part of it
    top_p: float = 1.0  # draw from the likeliest tokens that together have this probability; a greedy answer has none of it
    trie: Trie | None = None  # the answers that there may be; None: any


@dataclass(frozen=True, slots=True)
class Request:
    context: np.ndarray  # [c] int32
    sampling: Sampling
    seed: int  # the answer is a function of weights, context, sampling and seed


def edges_of(trie: Trie) -> Edges:
    return Edges(torch.from_numpy(trie.starts), torch.from_numpy(trie.tokens).long())


class RolloutEngine(Protocol):
    """One of your own is made as `Engine(directory, *, device, dtype, version, seed, max_length, **args)`: a Hugging Face directory, the version of the
    weights in it, "float32" or "bfloat16", and the most tokens of a context with its answer. `ptf.rl.contract` says what is relied on."""

    name: str
    in_batches: bool  # it answers all requests that wait to the end before it looks at others
    version: int  # policy step of the weights it holds

    async def generate(self, request: Request) -> Call:
        """One answer. Log-probs are those of the distribution sampled from (of allowed tokens, after temperature and top-p); of a greedy answer, at
        temperature 1. Raises ValueError for a request that it cannot serve."""
        ...

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """Check what arrived against the manifest, then replace the weights and forget every cached prefix. Raises SyncError, before any
        change, if the check fails."""
        ...

    def score(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs of each sequence's tokens 1…n-1 given those before them, at temperature 1."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back."""
        ...

    def wake(self) -> None: ...


def generate_all(engine: RolloutEngine, requests: Iterable[Request], timeout_s: float) -> list[Call]:
    """All requests at once, answers in their order. Raises TimeoutError after `timeout_s` seconds."""

    async def run() -> list[Call]:
        return list(await asyncio.wait_for(asyncio.gather(*(engine.generate(r) for r in requests)), timeout_s))

    return asyncio.run(run())
