"""Rewards whose calls may overlap in one process: an `async def`, or a function with an equivalent coroutine function.

A process returns its results in order, but many calls are in flight: 256 of a reward that waits for other services, and
one for each core of a reward that computes.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from ptf.config import Plugin, plugin

IN_FLIGHT = 256  # of a reward without an attribute `in_flight`


def concurrent(
    coroutine: Callable[..., Coroutine[Any, Any, float]],
    lines: Callable[..., Iterable[str]],
    *,
    where: Callable[..., bool] = lambda **_: True,
) -> Callable[[Callable], Callable]:
    """Declare `coroutine` as the coroutine function that computes the same reward as the decorated function.

    As many of its calls overlap as this process has cores. It is used only with arguments for which `where` returns
    True. `lines` is called with the reward's arguments and returns the first lines that a run prints about it; it
    raises UserError if the reward cannot be used on this machine.
    """

    def mark(function: Callable) -> Callable:
        vars(function).update(asynchronous=coroutine, first_lines=lines, where=where)
        vars(coroutine).update(in_flight=len(os.sched_getaffinity(0)))
        return function

    return mark


def asynchronous(what: Plugin) -> Callable[..., Any]:
    """Return the reward with its arguments bound, as a coroutine function where it is one or has one."""
    function = plugin.resolve(what.use)
    if coroutine := getattr(function, "asynchronous", None):
        return functools.partial(coroutine if function.where(**what.args) else function, **what.args)
    return plugin.bind(what)


def first_lines(what: Plugin) -> list[str]:
    """Return the first lines that a run prints about this reward. Raises UserError if it cannot be used here."""
    lines = getattr(plugin.resolve(what.use), "first_lines", None)
    return list(lines(**what.args)) if lines else []


def in_flight(function: Callable) -> int:
    """Return how many calls of a reward may run at once."""
    return getattr(function.func if isinstance(function, functools.partial) else function, "in_flight", IN_FLIGHT)


async def in_order(answer: Callable[[Any], Any], questions: Sequence[Any], most: int) -> AsyncIterator[Any]:
    """Yield a coroutine function's answer to each question, in order; at most `most` calls run at once."""
    free = asyncio.Semaphore(most)

    async def one(question: Any) -> Any:
        async with free:
            return await answer(question)

    tasks = [asyncio.create_task(one(question)) for question in questions]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()


def is_asynchronous(function: Callable) -> bool:
    """Return whether a reward, with or without bound arguments, is a coroutine function."""
    return inspect.iscoroutinefunction(function.func if isinstance(function, functools.partial) else function)
