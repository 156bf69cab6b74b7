"""Checks of what an engine answers: a request's own context, tokens of the vocabulary, and a log-prob and the version
of the engine's weights for each token."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import numpy as np

from ptf.data.trajectory import Generation
from ptf.errors import UserError
from ptf.rl.engines.protocol import GeneratingEngine, Progress, Request, StreamingEngine

Ask = Callable[[Request], Awaitable[Generation]]


async def answered(
    engine: GeneratingEngine, request: Request, vocabulary: int | None, ask: Ask | None = None
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


def follows_trie(generation: Generation, request: Request) -> bool:
    """Return whether the request's trie allows the response."""
    try:
        if request.sampling.trie is not None:
            request.sampling.trie.walked(generation.sampled_ids)
    except ValueError:
        return False
    return True


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
    faults = {
        "a context that is not the request's": not np.array_equal(generation.context, request.context),
        f"{len(sampled)} tokens of at most {most}": not 1 <= len(sampled) <= most,
        "a token that was not allowed": not follows_trie(generation, request),
        "a token that is not in the vocabulary": bool(((sampled < 0) | (sampled >= (vocabulary or np.inf))).any()),
        "log-probs that are not numbers of at most 0, one per token": len(logprobs) != len(sampled)
        or not bool(((np.abs(logprobs) <= np.finfo(np.float32).max) & (logprobs <= 1e-3)).all()),
        f"tokens whose version is not that of its weights, {version}": len(generation.versions) != len(sampled)
        or bool((generation.versions != version).any()),
    }
    return [fault for fault, present in faults.items() if present]
