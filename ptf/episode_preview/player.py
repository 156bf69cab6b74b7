"""Plays the episodes of a preview, as a rollout role of the run would, and records their times: when the policy was
asked, when its response was complete, when the episode ended.

A request carries a seed that belongs to one call of one episode, so a `TimedEngine` knows whose request it answers.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ptf.config import Job
from ptf.data.trajectory import Generation, Prompt, Trajectory
from ptf.episode_preview.policies import Script
from ptf.rl.engines.protocol import Progress, Request, StreamingEngine
from ptf.rl.engines.scripted import ScriptedEngine
from ptf.rl.episodes import Episode, run_episodes
from ptf.rl.event_loop import run_coroutine
from ptf.rl.policy.policy import Limits
from ptf.rl.rewards.scoring import Rewards, mark_without_result, score_groups
from ptf.rl.sampler import Sampler, seed_of
from ptf.workspace import progress


@dataclass(eq=False)
class EpisodeTimes:
    """Moments of one episode, in seconds of a monotonic clock."""

    began: float
    ended: float  # until the episode ends, the moment at which it began
    asked: dict[int, float] = field(default_factory=dict)  # number of a call → when the policy was asked
    answered: dict[int, float] = field(default_factory=dict)  # … → when its response was complete


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes that were played and scored, in order."""

    trajectories: Sequence[Trajectory]
    times: Sequence[EpisodeTimes]
    seconds: float  # of all episodes together, without scoring
    scoring_seconds: float


class TimedEngine:
    """An engine that records the times of the episodes that it answers."""

    def __init__(self, engine: StreamingEngine) -> None:
        self.engine, self.episodes = engine, list[EpisodeTimes]()
        self.calls: dict[int, tuple[int, int]] = {}  # seed of a request → (episode, number of the call)
        self.name, self.in_batches, self.version = engine.name, engine.in_batches, engine.version

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

    def _answer(self, seed: int) -> None:
        episode, call = self.calls[seed]
        self.episodes[episode].answered[call] = time.monotonic()

    async def generate(self, request: Request) -> Generation:
        """See RolloutEngine."""
        generation = await self.engine.generate(request)
        self._answer(request.seed)
        return generation

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """See StreamingEngine. A response that is not read to its end counts as complete then."""
        try:
            async with contextlib.aclosing(self.engine.stream(request)) as news:
                async for progress in news:
                    yield progress
        finally:
            self._answer(request.seed)


class Player:
    """Plays episodes with the parts of a job: rollout functions, the engine of a sampler, processes of a reward."""

    def __init__(self, job: Job, sampler: Sampler, rewards: Rewards) -> None:
        self.sampler, self.rewards = sampler, rewards
        self.is_scored = bool(rewards) or job.online_rollout.is_multi_turn
        self.together = job.online_rollout.prompts_per_step * job.online_rollout.group_size  # the most episodes at once
        self.timeout_s = sampler.episode_timeout_s or job.compute.timeout_s
        self.limits = sampler.limits(job.online_rollout.max_new_tokens, job.online_rollout.temperature)
        scores_groups = any(workers.signature.scores == "group" for workers, _ in rewards.values())
        self.per_prompt = job.online_rollout.group_size if scores_groups else 1

    def play(self, script: Script | None, prompts: Sequence[Prompt], episodes: int, what: str) -> Played:
        """Play this many episodes, `per_prompt` to each prompt, and score them.

        The sampler's engine answers, or a script, whose responses may be ones that the job's engine could not give.
        """
        engine, limits = self.sampler.engine, self.limits
        if script is not None:
            engine = ScriptedEngine(self.sampler.tokenizer, lambda seed, context: script(*timed.calls[seed], context))
            limits = replace(limits, sampling=replace(limits.sampling, trie=None))
        assert isinstance(engine, StreamingEngine)
        timed = TimedEngine(engine)
        began, found = time.monotonic(), list[Trajectory]()
        for first in range(0, episodes, self.together):
            numbers = range(first, min(first + self.together, episodes))
            found += run_coroutine(self._play_together(timed, limits, prompts, numbers, what))
        ended = time.monotonic()
        groups = [tuple(found[i : i + self.per_prompt]) for i in range(0, len(found), self.per_prompt)]
        scored = [t for group in score_groups(self.rewards, groups) for t in group]
        if self.is_scored:
            scored = [mark_without_result(t) for t in scored]
        return Played(scored, timed.episodes, ended - began, time.monotonic() - ended)

    def take_retries(self) -> dict[str, float]:
        """Return how often environments and rewards were asked once more since the last call."""
        counted = {
            "environment_retries": self.sampler if self.sampler.rollout_functions.environments else None,
            "reward_retries": self.rewards or None,
        }
        return {name: float(of.take_retries()) for name, of in counted.items() if of is not None}

    async def _play_together(
        self, engine: TimedEngine, limits: Limits, prompts: Sequence[Prompt], numbers: Sequence[int], what: str
    ) -> list[Trajectory]:
        """Play episodes at the same time; return their trajectories in order."""
        sampler, first, found = self.sampler, numbers[0], dict[int, Trajectory]()

        def episode(number: int) -> Episode:
            prompt, i = prompts[number // self.per_prompt], number % self.per_prompt
            # "try", so that they are the seeds of no step
            seeds = engine.begin(partial(seed_of, sampler.settings.engine.seed, "try", prompt.index, i))
            return Episode(
                prompt, limits, sampler.tokenizer, seeds, sampler.rollout_functions.of(prompt.source), self.timeout_s
            )

        with progress.phase(what, numbers[-1] + 1, "episodes", first) as phase:
            async for ended in run_episodes(engine, [episode(n) for n in numbers]):
                for number, trajectory in ended:
                    engine.episodes[first + number].ended = time.monotonic()
                    found[number] = trajectory
                    phase.advance()
        return [found[i] for i in range(len(numbers))]
