"""Episodes: each is one call of a `RolloutFunction`, which asks the policy and returns a trajectory.

They are ptf's own (one response, a conversation with an environment), or a function of the user's
(`rollout.play`). An episode whose function raises has no result; an engine that fails ends the step.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ptf.config import plugin
from ptf.config.sections.rollout import RolloutConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Trajectory
from ptf.errors import UserError, full_text
from ptf.rl.endpoint.harness_rollout import HarnessRollout
from ptf.rl.engines.protocol import GeneratingEngine, Request, StreamingEngine, answered, streamed
from ptf.rl.environments.protocol import Environments
from ptf.rl.environments.rollout import EnvironmentRollout
from ptf.rl.policy.calls import CallInput
from ptf.rl.policy.policy import Generate, Limits, Policy, Stream

RolloutFunction = Callable[[Prompt, Policy], Coroutine[Any, Any, Trajectory]]


async def one_response(prompt: Prompt, policy: Policy) -> Trajectory:
    """Play an episode of one response to the prompt's tokens; `rollout.reward` scores it."""
    await policy.generate(CallInput(prompt.tokens, ""))
    return policy.trajectory()


class RolloutFunctions:
    """What plays the episodes of each source."""

    def __init__(self, tokenizer: Tokenizer, config: RolloutConfig) -> None:
        self.by_source: dict[str, RolloutFunction] = {}  # the one of all sources has the name ""
        self.environments: list[Environments] = []  # whose processes start when they are first used
        for source, what in config.environment.items():
            environments = Environments(
                what.plugin,
                processes=config.reward_processes,
                timeout_s=config.reward_timeout_s,
                retries=config.reward_retries,
            )
            self.environments.append(environments)
            self.by_source[source] = EnvironmentRollout(environments, config.max_turns, what.weight)
        if config.play:
            self.by_source[""] = plugin.bind(config.play)
        if config.harness:
            self.by_source[""] = HarnessRollout(config.harness, tokenizer)

    def of(self, source: str) -> RolloutFunction:
        """Return what plays the episodes of a source."""
        return self.by_source.get(source, self.by_source.get("", one_response))

    def take_retries(self) -> int:
        """Return the number of requests to environments that were retried since the last call."""
        return sum(environments.take_retries() for environments in self.environments)

    def close(self) -> None:
        """End the processes of the environments and of the harness."""
        for environments in self.environments:
            environments.close()
        for function in self.by_source.values():
            if isinstance(function, HarnessRollout):
                function.close()


@dataclass(frozen=True)
class Episode:
    """One episode to be played."""

    prompt: Prompt
    limits: Limits
    tokenizer: Tokenizer
    seed_of: Callable[[int], int]  # number of a call → its seed; -1: the seed of all else that is random
    rollout_function: RolloutFunction = one_response
    timeout_s: float | None = None


@dataclass(eq=False)
class LockstepBatches:
    """Holds the requests of `live` episodes until all of them wait, then submits them as one batch.

    So the batches of an engine that answers in batches, and with them all bits, depend only on the episodes and not on
    the speed of their environments.
    """

    engine: GeneratingEngine
    live: int
    # the episode of each request, and its turn
    waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    running: int = 0  # requests of the batch that the engine answers
    scheduled: bool = False

    async def generate(self, episode: int, request: Request) -> Generation:
        """Return the response to a request of an episode."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((episode, turn))
        self._schedule()
        try:
            await turn
            return await self.engine.generate(request)
        finally:
            self.running -= not turn.cancelled()  # if it is, the request was in no batch
            self._schedule()

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
        self.waiting = [(episode, turn) for episode, turn in self.waiting if not turn.cancelled()]
        if not self.running and self.waiting and len({episode for episode, _ in self.waiting}) >= self.live:
            # of one episode, in the order of its requests
            batch, self.waiting = sorted(self.waiting, key=lambda one: one[0]), []
            self.running = len(batch)
            for _, turn in batch:
                turn.set_result(None)


async def run_episodes(
    engine: GeneratingEngine, episodes: Sequence[Episode]
) -> AsyncGenerator[list[tuple[int, Trajectory]]]:
    """Yield (index, trajectory) of each episode as soon as it ends, in lists of those that have ended since the last.

    A rollout function that is an async context manager is entered before all episodes and left after them. Episodes do
    not wait for each other, except with an engine that answers in batches: then all take their turns together, so that
    the batches are the same in every run.
    """
    lockstep = LockstepBatches(engine, len(episodes)) if engine.in_batches else None
    async with contextlib.AsyncExitStack() as resources:
        for function in {id(one.rollout_function): one.rollout_function for one in episodes}.values():
            if isinstance(function, contextlib.AbstractAsyncContextManager):
                await resources.enter_async_context(function)
        tasks = [asyncio.create_task(_run_one(engine, lockstep, i, episode)) for i, episode in enumerate(episodes)]
        ended = asyncio.Queue[asyncio.Task[tuple[int, Trajectory]]]()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        left = len(tasks)
        try:
            while left:
                together = [await ended.get()]
                while not ended.empty():
                    together.append(ended.get_nowait())
                left -= len(together)
                if whole := [task.result() for task in together if task.exception() is None]:
                    yield whole
                for task in together:
                    task.result()  # raises what the engine raised
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # they end what they have started


async def run_all(engine: GeneratingEngine, episodes: Sequence[Episode]) -> list[Trajectory]:
    """Run all episodes to their ends; return their trajectories in order."""
    trajectories = dict([one async for ended in run_episodes(engine, episodes) for one in ended])
    return [trajectories[i] for i in range(len(episodes))]


async def _run_one(
    engine: GeneratingEngine, lockstep: LockstepBatches | None, number: int, episode: Episode
) -> tuple[int, Trajectory]:
    """Play one episode. Raises what the engine raised, and UserError if it refuses the requests."""
    vocabulary, stream = episode.limits.vocabulary, None
    ask = engine.generate if lockstep is None else partial(lockstep.generate, number)
    if lockstep is None and isinstance(engine, StreamingEngine):
        stream = partial(streamed, engine, vocabulary=vocabulary)
    generate = partial(answered, engine, vocabulary=vocabulary, ask=ask)
    try:
        return number, await play_episode(episode, generate, engine.version, stream)
    finally:
        if lockstep is not None:
            lockstep.end()


async def play_episode(episode: Episode, generate: Generate, version: int, stream: Stream | None = None) -> Trajectory:
    """Play one episode, whose requests `generate` answers. Raises what it raised.

    The rollout function has a copy of the prompt, which it may change; the trajectory has the prompt itself.
    """
    prompt = episode.prompt if episode.rollout_function is one_response else plugin.own_copy(episode.prompt)
    policy = Policy(prompt, episode.limits, episode.tokenizer, episode.seed_of, generate, version, stream)
    deadline = asyncio.timeout(episode.timeout_s)
    try:
        async with deadline:
            trajectory = await episode.rollout_function(prompt, policy)
    except Exception as error:
        if policy.failure is not None:
            raise policy.failure from None
        reason = str(error) if isinstance(error, UserError) else f"the rollout function raised {full_text(error)}"
        if deadline.expired():
            reason = f"the episode did not end within {episode.timeout_s:g} s (rollout.episode_timeout_s)"
        trajectory = policy.trajectory(NoResult(reason), complete=False)
    if policy.failure is not None:
        raise policy.failure
    if not isinstance(trajectory, Trajectory):
        reason = (
            f"the rollout function returned a {type(trajectory).__name__}, not a Trajectory (policy.trajectory(reward))"
        )
        trajectory = policy.trajectory(NoResult(reason), complete=False)
    elif not policy.calls and not isinstance(trajectory.outcome, NoResult):
        trajectory = replace(trajectory, outcome=NoResult("the rollout function received no response from the policy"))
    return replace(trajectory, prompt=episode.prompt)
