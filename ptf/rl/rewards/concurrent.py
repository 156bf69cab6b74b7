"""How many calls of a reward or of an environment overlap in one process (ptf.rl.worker_server).

They are 256 of an `async def`, up to 64 of a plain function, in threads, and as many as its attribute
`max_concurrent_calls` says, if it has one.

A function may have an equivalent coroutine function, which is used instead (`concurrent`).
"""

import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ptf.config import Plugin, plugin
from ptf.workspace.credentials import resolved

COROUTINES = 256  # of a coroutine function without an attribute `max_concurrent_calls`
THREADS = 64  # of a plain function without one


def concurrent(
    coroutine: Callable[..., Coroutine[Any, Any, float]],
    lines: Callable[..., Iterable[str]],
) -> Callable[[Callable], Callable]:
    """Declare `coroutine` as the coroutine function that computes the same reward as the decorated function.

    As many of its calls overlap as this process has cores. `lines` is called with the reward's arguments and returns
    the first lines that a run prints about it; it raises UserError if the reward cannot be used on this machine.
    """

    def mark(function: Callable) -> Callable:
        vars(function).update(asynchronous=coroutine, first_lines=lines)
        vars(coroutine).update(max_concurrent_calls=lambda **_: len(os.sched_getaffinity(0)))
        return function

    return mark


def one_by_one(function: Callable) -> Callable:
    """Declare that calls of the decorated function do not overlap: it computes, or needs the main thread.

    Of a class, those are the calls of its instance.
    """
    setattr(function, "max_concurrent_calls", 1)  # noqa: B010 - a function's type has no such attribute
    return function


def asynchronous(what: Plugin) -> Callable[..., Any]:
    """Return the reward with its arguments bound, as a coroutine function where it is one or has one.

    Of a class it is an instance, constructed with the arguments.
    """
    target = plugin.resolve(what.use)
    target = getattr(target, "asynchronous", target)
    bound = plugin.Bound(target, **resolved(what.args, what.use))
    return bound() if isinstance(target, type) else bound


def first_lines(what: Plugin) -> list[str]:
    """Return the first lines that a run prints about this reward. Raises UserError if it cannot be used here."""
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
