"""Requests that arrive while a batch is computed are computed together in the next one."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batches(Generic[T, R]):
    """Calls `compute` in a thread with the items of several requests, `most` or as many as one request has.

    `compute` returns a result for each item, in order.
    """

    def __init__(self, compute: Callable[[Sequence[T]], Sequence[R]], most: int) -> None:
        self.compute, self.most = compute, most
        self.waiting: list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]] = []
        self.thread = ThreadPoolExecutor(1, "batches")
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, items: Sequence[T]) -> Sequence[R]:
        """Return the results of these items. Raises what `compute` raises."""
        future: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        self.waiting.append((items, future))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            batch = self._next()
            try:
                results = await loop.run_in_executor(
                    self.thread, self.compute, [i for items, _ in batch for i in items]
                )
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            start = 0
            for items, future in batch:
                if not future.done():
                    future.set_result(results[start : start + len(items)])
                start += len(items)

    def _next(self) -> list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]:
        """Take the requests of the next batch that somebody still waits for."""
        batch, size = list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]](), 0
        while self.waiting and (not batch or size + len(self.waiting[0][0]) <= self.most):
            items, future = self.waiting.pop(0)
            if not future.done():
                batch.append((items, future))
                size += len(items)
        return batch

    async def close(self) -> None:
        """Wait for the batch that is computed, and drop all others."""
        self.waiting.clear()
        await asyncio.to_thread(self.thread.shutdown)
