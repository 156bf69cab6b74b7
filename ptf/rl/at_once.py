"""Rewards of which many may run at once in one process: an `async def`, or a function that has one beside it.

The one idea: a process answers its questions in order, but has many in flight: of a reward that waits for others 256, of one that computes a core each.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from ptf.config import Plug, plug

IN_FLIGHT = 256  # of a reward that says nothing


def many_at_once(
    coroutine: Callable[..., Coroutine[Any, Any, float]], lines: Callable[..., Iterable[str]], *, where: Callable[..., bool] = lambda **_: True
) -> Callable[[Callable], Callable]:
    """Mark a reward as one that `coroutine` computes too, as many at once as this process has cores, for arguments where `where` holds; `lines` makes of
    its arguments what a run's first lines say of it, or refuses them."""

    def mark(function: Callable) -> Callable:
        function.asynchronous, function.first_lines, function.where = coroutine, lines, where  # type: ignore[attr-defined]
        coroutine.in_flight = len(os.sched_getaffinity(0))  # type: ignore[attr-defined]
        return function

    return mark


def asynchronous(what: Plug) -> Callable[..., Any]:
    """The reward with its arguments bound, as a coroutine function where it is one or has one."""
    function = plug.resolve(what.use)
    if coroutine := getattr(function, "asynchronous", None):
        return functools.partial(coroutine if function.where(**what.args) else function, **what.args)
    return plug.bind(what)


def first_lines(what: Plug) -> list[str]:
    """What a run that uses it says first. Raises UserError where it cannot be used here."""
    say = getattr(plug.resolve(what.use), "first_lines", None)
    return list(say(**what.args)) if say else []


def in_flight(function: Callable) -> int:
    """How many calls of it may run at once."""
    return getattr(function.func if isinstance(function, functools.partial) else function, "in_flight", IN_FLIGHT)


async def in_order(answer: Callable[[Any], Any], questions: Sequence[Any], most: int) -> AsyncIterator[Any]:
    """What a coroutine function answers to each, in order; at most so many run at once."""
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
    return inspect.iscoroutinefunction(function.func if isinstance(function, functools.partial) else function)
