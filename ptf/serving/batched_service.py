"""A service whose requests are computed in batches: what arrives while a batch is computed is in the next one."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ptf.rl.endpoint.http_message import HttpError, HttpRequest

T = TypeVar("T")
R = TypeVar("R")


class BatchedService(Generic[T, R]):
    """Calls `answers` in a thread with the items of several requests, `most` or as many as one request has; it returns
    a result for each, in order.

    `name` is that of the model.
    """

    def __init__(self, name: str, most: int, answers: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self.name, self.most, self.answers = name, most, answers
        self.waiting: list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]] = []
        self.thread = ThreadPoolExecutor(1, "batches")
        self.task: asyncio.Task[None] | None = None

    def body_of(self, request: HttpRequest, *known: str) -> dict[str, Any]:
        """Return the object in a request's body. Raises HttpError for one that is none, that has keys besides `known`
        and `model`, or that names another model."""
        given = request.json_object()
        if unknown := [name for name in given if name not in ("model", *known)]:
            raise HttpError(
                400, f"{str(unknown[0])[:80]} is not known here; there is model, {', '.join(known)}", "body"
            )
        if given.get("model", self.name) != self.name:
            raise HttpError(
                404, f"there is no model {str(given['model'])[:80]!r} here, only {self.name}", "model_not_found"
            )
        return given

    async def computed(self, items: Sequence[T]) -> Sequence[R]:
        """Return the results of these items. Raises what `answers` raises."""
        future: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        self.waiting.append((items, future))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self.waiting:
            batch = self._next()
            try:
                results = await asyncio.get_running_loop().run_in_executor(
                    self.thread, self.answers, [i for items, _ in batch for i in items]
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
