"""How many calls of a reward or of an environment overlap in one process (ptf.rl.worker_server).

They are 256 of an `async def`, up to 64 of a plain function, in threads, and as many as its attribute
`max_concurrent_calls` says, if it has one."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ptf.config import Plugin, plugin

COROUTINES = 256  # of a coroutine function without an attribute `max_concurrent_calls`
THREADS = 64  # of a plain function without one


def one_by_one(function: Callable) -> Callable:
    """Declare that calls of the decorated function do not overlap: it computes, or needs the main thread.

    Of a class, those are the calls of its instance.
    """
    setattr(function, "max_concurrent_calls", 1)  # noqa: B010 - a function's type has no such attribute
    return function


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
    own = function.func if isinstance(function, functools.partial) else function
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
