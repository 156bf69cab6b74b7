"""The protocol of rollout engines, `RolloutEngine`, with its requests and sampling parameters.

Each call of `generate` is one request, and the engine itself batches the requests of all callers. It knows the version
of its weights and records it with every token.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ptf.data.trajectory import Generation
from ptf.data.trie import Trie
from ptf.model.sampling import Edges
from ptf.rl.event_loop import run_coroutine
from ptf.rl.weights.verification import Buckets, Manifest, Receipt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is drawn."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    stop: tuple[int, ...]  # ids that end the response; the one that did is part of it
    # sample from the likeliest tokens that together have this probability; ignored by greedy responses
    top_p: float = 1.0
    trie: Trie | None = None  # the allowed responses; None: any


@dataclass(frozen=True, slots=True)
class Request:
    """A context to answer."""

    context: np.ndarray  # [c] int32
    sampling: Sampling
    seed: int  # the response is a function of weights, context, sampling, seed and offset
    offset: int = 0  # tokens of the response that are the end of the context already, so their random numbers are used


NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.float32))  # no tokens, no log-probs


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step of an engine adds to the response of one request."""

    number: int  # of the request, as the engine numbers them
    sampled_ids: np.ndarray  # [n] int32, sampled since the last Progress of this request
    logprobs: np.ndarray  # [n] float32
    generation: Generation | None = None  # the whole response, once it has ended
    error: Exception | None = None  # the reason if the request cannot be served


def edges_of(trie: Trie) -> Edges:
    """Return the trie's edges as tensors."""
    return Edges.of(torch.from_numpy(trie.starts), torch.from_numpy(trie.tokens).long())


class GeneratingEngine(Protocol):
    """What answers the requests of episodes."""

    name: str
    in_batches: bool  # True: it answers all waiting requests to the end before it takes further ones
    version: int  # policy step of its weights

    async def generate(self, request: Request) -> Generation:
        """Return one response. Raises ValueError for a request that the engine cannot serve.

        Log-probs are those of the distribution sampled from (of allowed tokens, after temperature and top-p); of a
        greedy response, at temperature 1.
        """
        ...


class RolloutEngine(GeneratingEngine, Protocol):
    """What generates responses from the weights of a policy.

    A plugin engine is constructed as `Engine(directory, *, device, dtype, version, seed, max_length, **args)`, with a
    Hugging Face directory, "float32" or "bfloat16", the version of the weights in the directory, and the most tokens of
    a context with its response. `ptf.rl.engines.conformance` checks what the controller relies on.
    """

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """Compare what arrived with the manifest, then replace the weights and drop every cached prefix.

        Raises SyncError if the comparison fails. Stored buckets, which all exist before the call, are compared before
        any weight changes: the engine keeps its version and its weights, and answers as before. Streamed buckets (of
        built-in engines only) arrive during the call, and earlier ones may have been loaded: the engine is not used
        further.
        """
        ...

    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probs of each context's tokens 1…n-1, given those before them, at temperature 1."""
        ...

    def sleep(self) -> None:
        """Free the accelerator's memory."""
        ...

    def wake(self) -> None:
        """Take the accelerator's memory again.

        The weights are as before `sleep`, unless the next call is `load_weights` with all of them.
        """
        ...


@runtime_checkable
class StreamingEngine(GeneratingEngine, Protocol):
    """An engine that reports tokens as they are sampled; other engines serve whole responses only."""

    def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """Yield the tokens of one response as they are sampled, with the last of them the whole generation.

        Closing the generator aborts the request. Raises what `generate` raises.
        """
        ...


def generate_all(engine: GeneratingEngine, requests: Iterable[Request], timeout_s: float) -> list[Generation]:
    """Submit all requests at once and return the responses in order. Raises TimeoutError after `timeout_s` seconds."""

    async def run() -> list[Generation]:
        return list(await asyncio.wait_for(asyncio.gather(*(engine.generate(r) for r in requests)), timeout_s))

    return run_coroutine(run())
