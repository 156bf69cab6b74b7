"""An engine that is stepped in its own thread: requests come and go between two steps."""

import asyncio
import itertools

import numpy as np
import pytest
import torch

from ptf.data.trajectory import Generation
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import NOTHING, Progress, Request, Sampling, StreamingEngine
from ptf.rl.engines.stepper import Stepper
from tests.rl.engines.test_native import ask, contexts
from tests.tiny import checkpoint

LONG = 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("engine") / "m")


def engine_of(directory, continuous: bool, **options) -> NativeEngine:
    return NativeEngine(
        str(directory), device=torch.device("cpu"), dtype=torch.float32, version=3, continuous=continuous, **options
    )


def endless(n: int, limit: int = LONG, seed: int = 0) -> list[Request]:
    return [Request(c, Sampling(limit, 1.0, ()), seed=seed + i) for i, c in enumerate(contexts(n, seed))]


async def whole(engine, request) -> tuple[list[int], list[float], Generation]:
    news = [one async for one in engine.stream(request)]
    tokens = [int(token) for one in news for token in one.sampled_ids]
    return tokens, [float(p) for one in news for p in one.logprobs], news[-1].generation


@pytest.mark.parametrize("continuous", [True, False])
def test_streamed_tokens_add_up_to_the_answer(directory, continuous):
    engine = engine_of(directory, continuous)
    assert isinstance(engine, StreamingEngine)

    async def run():
        return await asyncio.gather(*(whole(engine, r) for r in ask(contexts(6))))

    for tokens, logprobs, generation in asyncio.run(run()):
        assert tokens == generation.sampled_ids.tolist()
        assert logprobs == generation.logprobs.tolist()


def test_answers_are_those_of_fixed_batches_whenever_they_arrive(directory):
    fixed, engine = engine_of(directory, False), engine_of(directory, True, batch=5)
    requests = ask(contexts(11) + contexts(2), limit=30)
    expected = fixed.answer(requests)

    async def late(i: int, request: Request) -> Generation:
        await asyncio.sleep(0.003 * (i % 4))
        return await engine.generate(request)

    async def run():
        return await asyncio.gather(*(late(i, r) for i, r in enumerate(requests)))

    for ours, theirs in zip(asyncio.run(run()), expected, strict=True):
        assert ours.sampled_ids.tolist() == theirs.sampled_ids.tolist()
        assert ours.finished == theirs.finished
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    assert engine.continuous.cache.stored[0].shape[1] == 0, "an engine without requests holds no cache"


def test_a_request_is_answered_while_long_ones_run(directory):
    """The event loop is free, and a short answer does not wait for long ones; in a fixed batch it does."""

    async def order(engine) -> list[str]:
        ended = list[str]()

        async def one(name: str, request: Request) -> None:
            await engine.generate(request)
            ended.append(name)

        long = [asyncio.create_task(one("long", r)) for r in endless(4)]
        await asyncio.sleep(0.02)  # the long ones have begun
        await one("short", endless(1, 1, seed=50)[0])
        await asyncio.gather(*long)
        return ended

    assert asyncio.run(order(engine_of(directory, True)))[0] == "short"
    assert asyncio.run(order(engine_of(directory, False)))[-1] == "short"


def test_a_request_that_nobody_waits_for_is_aborted(directory):
    engine = engine_of(directory, True)

    async def run() -> int:
        keep = asyncio.create_task(engine.generate(endless(1)[0]))
        cancelled = asyncio.create_task(engine.generate(endless(1, 100_000, seed=7)[0]))
        stream = engine.stream(endless(1, 100_000, seed=9)[0])
        await anext(stream)
        cancelled.cancel()
        await stream.aclose()
        return len((await keep).sampled_ids)

    assert asyncio.run(run()) == LONG
    with engine.stepper.exclusively("load weights"):
        assert engine.continuous.responses == engine.continuous.waiting == []


def test_weights_are_not_replaced_below_a_request(directory):
    engine = engine_of(directory, True)

    async def run() -> None:
        task = asyncio.create_task(engine.generate(endless(1, 2000)[0]))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="cannot sleep while 1 requests are being served"):
            engine.sleep()
        task.cancel()

    asyncio.run(run())
    engine.sleep()


async def all_of(stepper: Stepper, requests: list[Request], **more) -> list[Generation]:
    return await asyncio.gather(*(stepper.generate(r) for r in requests), **more)


class Scripted:
    """Gives one token a step to each request; raises at the step `fails_at`."""

    def __init__(self, fails_at: int = -1, error: Exception | None = None) -> None:
        self.numbers, self.steps, self.fails_at, self.error = itertools.count(), 0, fails_at, error
        self.requests: dict[int, tuple[Request, int]] = {}

    def add(self, requests, streamed):
        numbers = [next(self.numbers) for _ in requests]
        self.requests |= {n: (r, 0) for n, r in zip(numbers, requests, strict=True)}
        return numbers

    def abort(self, numbers):
        for number in numbers:
            self.requests.pop(number)

    def step(self):
        self.steps += 1
        if self.steps == self.fails_at:
            raise self.error
        news = []
        for number, (request, n) in list(self.requests.items()):
            if len(request.context) > 90:
                news.append(Progress(number, *NOTHING, error=ValueError("too long")))
                del self.requests[number]
                continue
            over = n + 1 == request.sampling.max_new_tokens
            generation = None
            if over:
                ids = np.arange(n + 1, dtype=np.int32)
                generation = Generation(request.context, ids, -ids.astype(np.float32), ids * 0, False)
                del self.requests[number]
            else:
                self.requests[number] = (request, n + 1)
            news.append(Progress(number, np.array([n], np.int32), np.array([-n], np.float32), generation))
        return news


@pytest.mark.parametrize(("error", "raised"), [(OSError("broken"), OSError), (ValueError("odd"), RuntimeError)])
def test_a_step_that_fails_fails_all_requests_and_no_later_one(error, raised):
    stepper = Stepper(Scripted(5, error))

    with pytest.raises(raised) as caught:
        asyncio.run(all_of(stepper, endless(3, 9)))
    assert type(caught.value) is raised
    assert len(asyncio.run(stepper.generate(endless(1, 9)[0])).sampled_ids) == 9


def test_a_refused_request_is_refused_alone():
    stepper = Stepper(Scripted())
    refused = Request(np.zeros(91, np.int32), Sampling(3, 1.0, ()), 0)

    first, second, error = asyncio.run(all_of(stepper, [*endless(2, 3), refused], return_exceptions=True))
    assert len(first.sampled_ids) == len(second.sampled_ids) == 3
    assert type(error) is ValueError


def test_many_requests_from_several_loops_all_end():
    """The thread ends and begins again between requests, and loses none of them."""
    stepper = Stepper(Scripted())

    async def run() -> int:
        async def one(i: int) -> int:
            await asyncio.sleep(0.0002 * (i % 17))
            return len((await stepper.generate(endless(1, 1 + i % 5)[0])).sampled_ids)

        return sum(await asyncio.gather(*(one(i) for i in range(300))))

    assert [asyncio.run(run()) for _ in range(3)] == [sum(1 + i % 5 for i in range(300))] * 3
    assert stepper.engine.requests == {}


def test_a_step_wakes_a_loop_once_however_many_requests_it_ends(monkeypatch):
    stepper, woken = Stepper(Scripted()), []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (woken.append(a), wake(*a, **k))[1])
        answers = await all_of(stepper, [*endless(40, 2), *endless(30, 3)])
        assert [len(one.sampled_ids) for one in answers] == [2] * 40 + [3] * 30

    asyncio.run(run())
    assert len(woken) == stepper.engine.steps == 3
