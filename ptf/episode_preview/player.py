"""Plays the episodes of a preview, as a rollout role of the run would."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ptf.config import Job
from ptf.data.trajectory import Prompt, Trajectory
from ptf.episode_preview.clock import Clock, EpisodeTimes, TimedEngine
from ptf.episode_preview.scripts import Script
from ptf.rl.engines.protocol import StreamingEngine
from ptf.rl.engines.scripted import ScriptedEngine
from ptf.rl.episodes import Episode, run_episodes
from ptf.rl.event_loop import run_coroutine
from ptf.rl.policy.policy import Limits
from ptf.rl.rewards.by_source import Rewards, mark_without_result, score_groups
from ptf.rl.sampler import Sampler, seed_of
from ptf.workspace import progress

KEY = "try"  # of the seeds, so that they are those of no step


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes that were played and scored, in order."""

    trajectories: Sequence[Trajectory]
    times: Sequence[EpisodeTimes]
    seconds: float  # of all episodes together, without scoring
    scoring_seconds: float


class Player:
    """Plays episodes with the parts of a job: rollout functions, the engine of a sampler, processes of a reward."""

    def __init__(self, job: Job, sampler: Sampler, rewards: Rewards | None) -> None:
        assert job.rollout is not None
        self.job, self.sampler, self.rewards = job, sampler, rewards
        self.rollout = job.rollout
        self.together = job.rollout.prompts_per_step * job.rollout.group_size  # the most episodes at once
        self.timeout_s = sampler.episode_timeout_s or job.compute.timeout_s
        self.limits = sampler.limits(job.rollout.max_new_tokens, job.rollout.temperature)
        self.per_prompt = job.rollout.group_size if rewards and rewards.score_whole_groups else 1

    def play(self, script: Script | None, prompts: Sequence[Prompt], episodes: int, what: str) -> Played:
        """Play this many episodes, `per_prompt` to each prompt, and score them.

        The sampler's engine answers, or a script, whose responses may be ones that the job's engine could not give.
        """
        clock, engine, limits = Clock(), self.sampler.engine, self.limits
        if script is not None:
            engine = ScriptedEngine(self.sampler.tokenizer, lambda seed, context: script(*clock.calls[seed], context))
            limits = replace(limits, sampling=replace(limits.sampling, trie=None))
        assert isinstance(engine, StreamingEngine)
        timed = TimedEngine(engine, clock)
        began, found = time.monotonic(), list[Trajectory]()
        for first in range(0, episodes, self.together):
            numbers = range(first, min(first + self.together, episodes))
            found += run_coroutine(self._play_together(timed, limits, prompts, numbers, what))
        ended = time.monotonic()
        groups = [tuple(found[i : i + self.per_prompt]) for i in range(0, len(found), self.per_prompt)]
        scored = [self._ended(t) for group in score_groups(self.rewards, groups) for t in group]
        return Played(scored, clock.episodes, ended - began, time.monotonic() - ended)

    def take_retries(self) -> dict[str, float]:
        """Return how often environments and rewards were asked once more since the last call."""
        retries = (
            {"environment_retries": float(self.sampler.take_retries())}
            if self.sampler.rollout_functions.environments
            else {}
        )
        if self.rewards is not None:
            retries["reward_retries"] = float(self.rewards.take_retries())
        return retries

    def _ended(self, trajectory: Trajectory) -> Trajectory:
        """Return an episode; one that the job should score, but that nothing scored, has no result."""
        if trajectory.outcome is not None or not (self.rewards or self.rollout.is_multi_turn):
            return trajectory
        return mark_without_result(trajectory)

    async def _play_together(
        self, engine: TimedEngine, limits: Limits, prompts: Sequence[Prompt], numbers: Sequence[int], what: str
    ) -> list[Trajectory]:
        """Play episodes at the same time; return their trajectories in order."""
        sampler, clock, first, found = self.sampler, engine.clock, numbers[0], dict[int, Trajectory]()

        def episode(number: int) -> Episode:
            prompt, i = prompts[number // self.per_prompt], number % self.per_prompt
            seeds = clock.begin(partial(seed_of, sampler.seed, KEY, prompt.index, i))
            return Episode(
                prompt, limits, sampler.tokenizer, seeds, sampler.rollout_functions.of(prompt.source), self.timeout_s
            )

        with progress.phase(what, numbers[-1] + 1, "episodes", first) as phase:
            async for ended in run_episodes(engine, [episode(n) for n in numbers]):
                for number, trajectory in ended:
                    clock.end(first + number)
                    found[number] = trajectory
                    phase.advance()
        return [found[i] for i in range(len(numbers))]
