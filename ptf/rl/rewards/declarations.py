"""What a reward declares: whether it is called with one response, with all responses to a prompt, or with a batch of
responses to any prompts, and how many of its calls overlap in one process.

A reward without a declaration is called with one response; ptf.config.reward_signature reads that attribute. Calls of
an `async def` that overlap are 256, of a plain function up to 64, in threads, and as many as its attribute
`max_concurrent_calls` says, if it has one. The same number holds for an environment.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ptf.config import Plugin, plugin
from ptf.config.reward_signature import called

Target = TypeVar("Target", bound=Callable[..., Any])
COROUTINES = 256  # of a coroutine function without an attribute `max_concurrent_calls`
THREADS = 64  # of a plain function without one


def one_by_one(function: Callable) -> Callable:
    """Declare that calls of the decorated function do not overlap: it computes, or needs the main thread.

    Of a class, those are the calls of its instance.
    """
    setattr(function, "max_concurrent_calls", 1)  # noqa: B010 - a function's type has no such attribute
    return function


def scores_groups(reward: Target) -> Target:
    """Declare that the reward is `(row, texts, **args) -> list[float]`: it is called once for each prompt, with all
    responses to it, and returns one number for each, in their order.

    A call that fails is repeated, with the whole group, up to `rollout.reward_retries` times; if it still fails, no
    response to the prompt has a result.
    """
    return _declared(reward, "group", 1)


def batched(max_size: int | Callable[..., int]) -> Callable[[Target], Target]:
    """Declare that the reward is `(items, **args) -> list[float]`: it is called with up to `max_size` responses to any
    prompts, each `(row, text)`, and returns one number for each, in their order.

    `max_size` may be a function of the reward's arguments. If a call fails, its responses are scored again one by one.
    Calls of a plain function, or of an object with a plain `__call__`, are made one after the other, unless its
    attribute `max_concurrent_calls` says how many may overlap: it computes, with a model that is used by one thread at
    a time.
    """
    if isinstance(max_size, int) and max_size < 1:
        raise ValueError(f"a batch has at least one response, so max_size cannot be {max_size}")

    def declare(reward: Target) -> Target:
        if not (hasattr(reward, "max_concurrent_calls") or inspect.iscoroutinefunction(called(reward))):
            one_by_one(reward)
        return _declared(reward, "batch", max_size)

    return declare


def _declared(reward: Target, scores: str, max_size: int | Callable[..., int]) -> Target:
    if "scored_together" in vars(reward):
        raise TypeError(f"{reward.__name__} is declared twice: a reward scores groups or batches")
    for name, value in (("scored_together", scores), ("max_size", max_size)):
        setattr(reward, name, value)
    return reward


def reward_of(what: Plugin) -> Callable[..., Any]:
    """Return the reward with its arguments bound; of a class an instance, constructed with the arguments."""
    bound = plugin.bind(what)
    return bound() if isinstance(plugin.resolve(what.use), type) else bound


def first_lines(what: Plugin) -> list[str]:
    """Return the first lines that a run prints about this reward: what its attribute `first_lines` returns for its
    arguments, if it has one, which raises UserError if the reward cannot be used on this machine."""
    lines = getattr(plugin.resolve(what.use), "first_lines", None)
    return list(lines(**what.args)) if lines else []


def max_concurrent_calls(function: Callable, default: int | None = None) -> int:
    """Return how many calls of a reward, or of environments, may overlap."""
    own, arguments = (function.func, function.keywords) if isinstance(function, functools.partial) else (function, {})
    found: Any = getattr(own, "max_concurrent_calls", default or (COROUTINES if is_asynchronous(own) else THREADS))
    return int(found(**arguments)) if callable(found) else int(found)  # pyright: ignore[reportArgumentType]


def is_asynchronous(function: Callable) -> bool:
    """Return whether the calls of a reward, with or without bound arguments, are coroutines.

    Of an object, its attribute `is_coroutine` says so if it has one, otherwise its method `__call__`.
    """
    own = function
    while isinstance(own, functools.partial):  # of the job's arguments, and of those of a call
        own = own.func
    method = getattr(type(own), "__call__", None)  # noqa: B004
    return getattr(own, "is_coroutine", inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(method))


async def overlapping_call(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Return what a reward returns to one of several calls in an event loop: a plain function runs in a thread, or in
    the loop if its calls must not overlap."""
    if is_asynchronous(function):
        return await function(*arguments, **keywords)
    if max_concurrent_calls(function) == 1:
        return function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)
