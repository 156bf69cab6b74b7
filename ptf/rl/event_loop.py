"""An event loop that synchronous code runs coroutines in, also where one runs already, as in a notebook."""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs one coroutine after another in a loop and a thread of its own; tasks that they began go on when the next one
    runs.

    `close` cancels what has not ended.
    """

    def __init__(self) -> None:
        self._runner, self._thread = asyncio.Runner(), ThreadPoolExecutor(1, "event loop")
        self._loop = self._thread.submit(self._runner.get_loop).result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns. If this thread is interrupted, the loop's end cancels it at the latest."""
        task = self._loop.create_task(coroutine)
        ended = self._thread.submit(self._loop.run_until_complete, task)
        try:
            return ended.result()
        finally:
            if not ended.done():
                self._loop.call_soon_threadsafe(task.cancel)
                wait([ended])

    def close(self) -> None:
        """Cancel what has not ended, and end the loop."""
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, after an event loop of its own ran it."""
    with contextlib.closing(EventLoop()) as loop:
        return loop.run(coroutine)
