"""Batches of an engine that answers in batches: one begins once every episode that runs has a request waiting.

So the batches, and with them all bits, depend only on the episodes and not on the speed of their environments.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ptf.data.trajectory import Generation
from ptf.rl.engines.protocol import Request, RolloutEngine


@dataclass(eq=False)
class Waiting:
    """A request that waits for its batch."""

    episode: int
    request: Request
    answer: "asyncio.Future[Generation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LockstepBatches:
    """Holds the requests of `live` episodes until all of them wait, then submits them as one batch."""

    def __init__(self, engine: RolloutEngine, live: int) -> None:
        self.engine, self.live = engine, live
        self.waiting: list[Waiting] = []
        self.batches: set[asyncio.Task[Any]] = set()
        self.scheduled = False

    async def generate(self, episode: int, request: Request) -> Generation:
        """Return the response to a request of an episode."""
        waiting = Waiting(episode, request)
        self.waiting.append(waiting)
        self._schedule()
        return await waiting.answer

    def end(self) -> None:
        """Note that an episode has ended: no batch waits for it."""
        self.live -= 1
        self._schedule()

    def _schedule(self) -> None:
        if not self.scheduled:  # not at once: an episode may make several requests together
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self.scheduled = False
        self.waiting = [one for one in self.waiting if not one.answer.done()]  # without those that were cancelled
        if self.waiting and len({one.episode for one in self.waiting}) >= self.live:
            batch = sorted(self.waiting, key=lambda one: one.episode)  # of one episode, in the order of its requests
            self.waiting = []
            task = asyncio.create_task(self._answer(batch))
            self.batches.add(task)
            task.add_done_callback(self.batches.discard)

    async def _answer(self, batch: list[Waiting]) -> None:
        generations = await asyncio.gather(
            *(self.engine.generate(one.request) for one in batch), return_exceptions=True
        )
        for one, generation in zip(batch, generations, strict=True):
            if one.answer.done():
                continue
            if isinstance(generation, BaseException):
                one.answer.set_exception(generation)
            else:
                one.answer.set_result(generation)
