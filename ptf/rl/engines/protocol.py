"""The protocol of rollout engines, `RolloutEngine`, with its requests and sampling parameters, and the checks of what
an engine answers.

Each call of `generate` is one request, and the engine itself batches the requests of all callers. It knows the version
of its weights and records it with every token.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ptf.data.trajectory import Generation
from ptf.data.trie import Trie
from ptf.errors import UserError
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
    error: BaseException | None = None  # the reason if the request cannot be served


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


async def answered(
    engine: GeneratingEngine,
    request: Request,
    vocabulary: int | None,
    ask: Callable[[Request], Awaitable[Generation]] | None = None,
) -> Generation:
    """Return an engine's response to a request; `ask` asks it, by default its `generate`.

    Raises EngineFault if the response breaks the protocol, UserError if the engine refuses the request.
    """
    try:
        generation = await (ask or engine.generate)(request)
    except ValueError as error:
        raise refusal(error, engine) from error
    raise_if_garbage(generation, request, engine, vocabulary)
    return generation


async def streamed(engine: StreamingEngine, request: Request, vocabulary: int | None) -> AsyncGenerator[Progress]:
    """Yield the tokens of an engine's response as they are sampled. Raises as `answered`, before the last of them."""
    try:
        async with contextlib.aclosing(engine.stream(request)) as news:
            async for progress in news:
                if progress.generation is not None:
                    raise_if_garbage(progress.generation, request, engine, vocabulary)
                yield progress
    except ValueError as error:
        raise refusal(error, engine) from error


def refusal(error: ValueError, engine: GeneratingEngine) -> Exception:
    """Return what a ValueError of an engine means: the request is refused. A subclass is a fault inside the engine."""
    if type(error) is not ValueError:
        return error
    return UserError(f"the rollout engine {engine.name} cannot serve this run's requests: {error}")


class EngineFault(RuntimeError):
    """An engine gave a response that breaks the protocol."""


def raise_if_garbage(
    generation: Generation, request: Request, engine: GeneratingEngine, vocabulary: int | None
) -> None:
    """Raise EngineFault unless the generation is a response to the request.

    A generation must have the request's context, and tokens of the vocabulary, each with a log-prob and the version of
    the engine's weights.
    """
    try:
        faults = generation_errors(generation, request, engine.version, vocabulary)
    except (AttributeError, TypeError, ValueError) as error:
        faults = [f"a {type(generation).__name__}, which is not a valid generation ({error})"]
    if faults:
        raise EngineFault(f"the rollout engine {engine.name} answered with {' and '.join(faults)}")


def generation_errors(generation: Generation, request: Request, version: int, vocabulary: int | None) -> list[str]:
    """Return the faults of a generation, in words. May raise any error if its attributes have wrong types."""
    sampled, logprobs, most = generation.sampled_ids, generation.logprobs, request.sampling.max_new_tokens
    if sampled.dtype.kind not in "iu" or logprobs.dtype.kind != "f":
        return [f"tokens of type {sampled.dtype} and log-probs of type {logprobs.dtype}"]
    trie = request.sampling.trie
    try:
        allowed = trie is None or trie.walked(sampled) is not None
    except ValueError:
        allowed = False
    faults = {
        "a context that is not the request's": not np.array_equal(generation.context, request.context),
        f"{len(sampled)} tokens of at most {most}": not 1 <= len(sampled) <= most,
        "a token that was not allowed": not allowed,
        "a token that is not in the vocabulary": bool(((sampled < 0) | (sampled >= (vocabulary or np.inf))).any()),
        "log-probs that are not numbers of at most 0, one per token": len(logprobs) != len(sampled)
        or not bool(((np.abs(logprobs) <= np.finfo(np.float32).max) & (logprobs <= 1e-3)).all()),
        f"tokens whose version is not that of its weights, {version}": len(generation.versions) != len(sampled)
        or bool((generation.versions != version).any()),
    }
    return [fault for fault, present in faults.items() if present]
