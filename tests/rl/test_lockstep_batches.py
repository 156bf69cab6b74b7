"""Requests of episodes wait for each other, and are sampled as one batch in the order of the episodes."""

import asyncio
from typing import Any

import numpy as np
import pytest

from ptf.data.trajectory import Generation
from ptf.rl.engines.protocol import Request, Sampling
from ptf.rl.episodes import LockstepBatches


class Engine:
    """Answers once it is told to, with the seed of the request; a seed of 9 is refused."""

    def __init__(self) -> None:
        self.asked, self.told = list[int](), asyncio.Event()

    async def generate(self, request: Request) -> Generation:
        self.asked.append(request.seed)
        await self.told.wait()
        if request.seed == 9:
            raise ValueError("refused")
        one = np.array([request.seed], np.int32)
        return Generation(request.context, one, one.astype(np.float32), one, True)


def request(seed: int) -> Request:
    return Request(np.array([1], np.int32), Sampling(1, 1.0, ()), seed)


def test_a_batch_begins_when_all_live_episodes_wait():
    async def played() -> None:
        engine: Any = Engine()
        batches = LockstepBatches(engine, live=3)
        asked = [asyncio.create_task(batches.generate(episode, request(episode))) for episode in (2, 0)]
        await asyncio.sleep(0.01)
        assert engine.asked == []
        asked.append(asyncio.create_task(batches.generate(1, request(1))))
        await asyncio.sleep(0.01)
        assert engine.asked == [0, 1, 2]
        engine.told.set()
        assert [int(one.sampled_ids[0]) for one in await asyncio.gather(*asked)] == [2, 0, 1]

    asyncio.run(played())


def test_a_request_that_is_refused_fails_alone():
    async def played() -> None:
        engine: Any = Engine()
        engine.told.set()
        batches = LockstepBatches(engine, live=2)
        refused, answered = (asyncio.create_task(batches.generate(i, request(seed))) for i, seed in ((0, 9), (1, 4)))
        with pytest.raises(ValueError, match="refused"):
            await refused
        assert (await answered).sampled_ids.tolist() == [4]

    asyncio.run(played())
