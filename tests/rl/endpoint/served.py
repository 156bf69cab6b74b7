"""A session that is served for a test: a scripted engine, an endpoint, and what was trained at the end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from ptf.data.tool_calls import parser
from ptf.data.trajectory import Generation, Prompt, Trajectory
from ptf.rl.endpoint.endpoint import Endpoint
from ptf.rl.endpoint.session import Bounds, Session
from ptf.rl.engines.protocol import Progress, Request, Sampling
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits, Policy


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Scripted:
    """An engine whose answers are texts of a script, by the number of the request; tokens come one at a time."""

    name, version, in_batches = "scripted", 3, False

    def __init__(self, tokenizer: Any, texts: Callable[[int], str] = str, pause_s: float = 0.0) -> None:
        self.tokenizer, self.texts, self.pause_s, self.asked = tokenizer, texts, pause_s, list[Request]()

    def generation(self, request: Request) -> Generation:
        number = len(self.asked)
        self.asked.append(request)
        ids = [*self.tokenizer.encode(self.texts(number)), self.tokenizer.stop_ids[0]]
        sampled = np.array(ids[: request.sampling.max_new_tokens], np.int32)
        finished = bool(sampled[-1] == self.tokenizer.stop_ids[0])
        logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
        return Generation(request.context, sampled, logprobs, np.full(len(sampled), 3, np.int32), finished)

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(self.pause_s)
        return self.generation(request)

    async def stream(self, request: Request):
        generation = self.generation(request)
        for i in range(len(generation.sampled_ids)):
            await asyncio.sleep(self.pause_s)
            last = i + 1 == len(generation.sampled_ids)
            part = slice(i, i + 1)
            yield Progress(0, generation.sampled_ids[part], generation.logprobs[part], generation if last else None)

    def load_weights(self, buckets, manifest): ...
    def prompt_logprobs(self, tokens): ...
    def sleep(self): ...
    def wake(self): ...


class Broken(Scripted):
    async def stream(self, request: Request):
        raise RuntimeError("the device is away")
        yield


class Served:
    """A play that serves one session and calls `agent(self)`."""

    def __init__(self, agent: Callable[["Served"], Awaitable[Any]], form: str | None = "hermes", **bounds: int) -> None:
        self.agent, self.form, self.bounds = agent, form, Bounds(**bounds)
        self.error: BaseException | None = None

    async def __aenter__(self) -> "Served":
        self.endpoint = Endpoint()
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.close()

    async def __call__(self, prompt: Prompt, policy: Policy) -> Trajectory:
        self.session = Session(policy, parser(self.form) if self.form else None, self.bounds)
        self.url = self.endpoint.open(self.session)
        self.port = self.endpoint.server.port
        try:
            self.result = await self.agent(self)
        except BaseException as error:
            self.error = error
            raise
        await self.session.close()
        return self.session.trajectory(1.0)

    def client(self, **options: Any) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url, api_key=self.session.agent_key, timeout=20, **options)


def played(
    agent: Callable[[Served], Awaitable[Any]],
    engine: Any,
    tokenizer: Any,
    length: int = 4000,
    answer: int = 500,
    raises: type[BaseException] | None = None,
    **more: Any,
) -> tuple[Served, Trajectory]:
    """Play one episode with an agent; return what it was served, and what would be trained."""
    limits = Limits(Sampling(answer, 1.0, tokenizer.stop_ids), length)
    play = Served(agent, **more)
    prompt = Prompt(np.array([9], np.int32), {}, "a", 0)
    episode = Episode(prompt, limits, tokenizer, lambda number: number + 1, play, timeout_s=30)
    (trajectory,) = asyncio.run(run_all(engine, [episode]))
    if play.error is not None and not (raises and isinstance(play.error, raises)):
        raise play.error
    return play, trajectory
