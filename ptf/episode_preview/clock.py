"""The times of episodes: when the policy was asked, when its response was complete, when the episode ended.

A request carries a seed that belongs to one call of one episode, so an engine that is wrapped by `TimedEngine` knows
whose request it answers.
"""

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ptf.data.trajectory import Generation
from ptf.rl.engines.protocol import Progress, Request, StreamingEngine
from ptf.rl.weights.verification import Buckets, Manifest, Receipt


@dataclass(eq=False)
class EpisodeTimes:
    """Moments of one episode, in seconds of a monotonic clock."""

    began: float
    ended: float  # until the episode ends, the moment at which it began
    asked: dict[int, float] = field(default_factory=dict)  # number of a call → when the policy was asked
    answered: dict[int, float] = field(default_factory=dict)  # … → when its response was complete


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one response of the policy, and of what follows it until the policy is asked again or the episode
    ends."""

    policy_seconds: float
    other_seconds: float  # of the environment, the rollout function or the harness

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole turn."""
        return self.policy_seconds + self.other_seconds


class Clock:
    """Records the times of some episodes."""

    def __init__(self) -> None:
        self.episodes: list[EpisodeTimes] = []
        self.calls: dict[int, tuple[int, int]] = {}  # seed of a request → (episode, number of the call)

    def begin(self, seed_of: Callable[[int], int]) -> Callable[[int], int]:
        """Begin the next episode; return the seeds of its calls, which are recorded when they are asked for."""
        number, now = len(self.episodes), time.monotonic()
        times = EpisodeTimes(now, now)
        self.episodes.append(times)

        def recorded(call: int) -> int:
            seed = seed_of(call)
            if call >= 0:
                self.calls[seed] = number, call
                times.asked[call] = time.monotonic()
            return seed

        return recorded

    def end(self, episode: int) -> None:
        """Note that an episode has ended."""
        self.episodes[episode].ended = time.monotonic()

    def answer(self, seed: int) -> None:
        """Note that the response to a request is complete."""
        episode, call = self.calls[seed]
        self.episodes[episode].answered[call] = time.monotonic()


def start_seconds(times: EpisodeTimes) -> float:
    """Return the seconds until the policy was asked first; of an episode that never asked, all of its seconds."""
    return min(times.asked.values(), default=times.ended) - times.began


def turns_of(times: EpisodeTimes) -> tuple[Turn, ...]:
    """Return the turns of an episode that has ended, in the order in which the policy was asked."""
    calls = sorted((moment, call) for call, moment in times.asked.items())
    turns = []
    for (asked, call), later in itertools.pairwise([*calls, (times.ended, -1)]):
        end = later[0]
        answered = times.answered.get(call, end)
        turns.append(Turn(answered - asked, max(0.0, end - answered)))  # calls may overlap
    return tuple(turns)


class TimedEngine:
    """An engine that notes in a clock when each response is complete."""

    def __init__(self, engine: StreamingEngine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.name, self.in_batches, self.version = engine.name, engine.in_batches, engine.version

    async def generate(self, request: Request) -> Generation:
        """See RolloutEngine."""
        generation = await self.engine.generate(request)
        self.clock.answer(request.seed)
        return generation

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """See StreamingEngine. A response that is not read to its end counts as complete then."""
        try:
            async with contextlib.aclosing(self.engine.stream(request)) as news:
                async for progress in news:
                    yield progress
        finally:
            self.clock.answer(request.seed)

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """See RolloutEngine."""
        return self.engine.load_weights(buckets, manifest)

    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See RolloutEngine."""
        return self.engine.prompt_logprobs(tokens)

    def sleep(self) -> None:
        """See RolloutEngine."""
        self.engine.sleep()

    def wake(self) -> None:
        """See RolloutEngine."""
        self.engine.wake()
