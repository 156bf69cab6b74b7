"""An event loop that synchronous code runs coroutines in, also where one runs already, as in a notebook."""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs one coroutine after another in a loop of its own; tasks that they began go on when the next one runs.

    In a thread whose event loop is running, such as a notebook's, or with `own_thread`, they run in a thread beside it.
    """

    def __init__(self, *, own_thread: bool = False) -> None:
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, "event loop") if own_thread or asyncio._get_running_loop() else None
        self._loop = self._thread.submit(self._runner.get_loop).result() if self._thread else self._runner.get_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns. If this thread is interrupted, the loop's end cancels it at the latest."""
        if self._thread is None:
            # Runner.run would call signal.getsignal twice, which formats the whole result
            return self._loop.run_until_complete(coroutine)
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
        if self._thread is None:
            self._runner.close()
            return
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, after an event loop of its own ran it."""
    with contextlib.closing(EventLoop()) as loop:
        return loop.run(coroutine)
