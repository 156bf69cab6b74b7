"""The rollouts of an online run, as the controller uses them: the groups of each step with their outcomes.

`SynchronousRollouts` is here; `ptf.rl.asynchronous` has those with `rollout.max_staleness`.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ptf.data.trajectory import Group
from ptf.errors import UserError
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.online_job import OnlineJob
from ptf.rl.outcomes import outcome_metrics, rewards_differ
from ptf.rl.rewards.by_source import GroupScoring, mark_without_result
from ptf.rl.rewards.model import RewardModelClient
from ptf.rl.rollout_role import training_rewards
from ptf.workspace import progress


class Rollouts(ABC):
    """Samples and scores the responses of each step."""

    def __init__(self, online: OnlineJob, cluster: Cluster, rollout: RoleGroup) -> None:
        self.online, self.config, self.cluster, self.rollout = online, online.rollout, cluster, rollout
        self.rewards = training_rewards(online.job)
        self.reward_wait = 0.0  # seconds of a step after its last response was there

    @abstractmethod
    def step(self, version: int) -> AbstractContextManager[tuple[list[Group], dict[str, float]]]:
        """Run a block that trains on the groups of a step; the engines have the weights of `version`.

        It gets the groups with their outcomes, and metrics, to which some may be added when the block has ended.
        """

    @abstractmethod
    def take_environment_retries(self) -> float:
        """Return how many requests to environments were retried since the last call."""

    def responses(self) -> list[np.ndarray]:
        """Return the tokens [T] of some responses in flight, with their contexts."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the state between two steps, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        assert "in_flight" not in state

    def close(self) -> None:
        """End what is in flight, and the processes of rewards and environments."""
        if self.rewards:
            self.rewards.close()

    def finish(self, scoring: GroupScoring, groups: list[Group]) -> list[Group]:
        """Return the groups with their outcomes."""
        began = time.perf_counter()
        with progress.phase("rewards"):
            groups = scoring.finish(groups)
        self.reward_wait += time.perf_counter() - began
        return groups

    def metrics(self, groups: list[Group], version: int) -> dict[str, float]:
        """Return metrics over the outcomes of all responses of a step."""
        metrics = outcome_metrics(groups, version, self.config, by_source=len(self.online.job.data.sources) > 1)
        retried = 0.0 if self.rewards is None else float(self.rewards.take_retries())
        metrics["rewards_retried"] = retried + self.take_environment_retries()
        metrics["seconds/reward_wait"], self.reward_wait = self.reward_wait, 0.0
        return metrics


class SynchronousRollouts(Rollouts):
    """Each step waits for all its responses."""

    def __init__(
        self, online: OnlineJob, cluster: Cluster, rollout: RoleGroup, reward_model: RewardModelClient | None
    ) -> None:
        super().__init__(online, cluster, rollout)
        self.reward_model = reward_model

    @contextlib.contextmanager
    def step(self, version: int) -> Iterator[tuple[list[Group], dict[str, float]]]:
        """See Rollouts.step.

        With `rollout.max_resampling_rounds` (the dynamic sampling of DAPO), prompts are drawn until the rewards differ
        within each of `rollout.prompts_per_step` groups, in at most so many rounds.
        """
        wanted, rounds = self.config.prompts_per_step, self.config.max_resampling_rounds
        sampled, usable, groups = list[Group](), list[Group](), list[Group]()
        for left in reversed(range(rounds or 1)):
            groups = self._sampled(version, wanted - len(usable), is_last=left == 0)
            sampled += groups
            usable += [group for group in groups if rewards_differ(group)] if rounds else groups
            if len(usable) == wanted:
                if left:
                    self.rollout.call("expect_weights")
                break
        metrics = self.metrics(sampled, version)
        if not usable and "reward" in metrics:
            self._report_equal_rewards(version, len(sampled), metrics["reward"])
        yield usable or groups, metrics

    def take_environment_retries(self) -> float:
        """See Rollouts.take_environment_retries."""
        return float(self.rollout.call("take_retries")) if self.config.environment else 0.0

    def _sampled(self, version: int, count: int, is_last: bool) -> list[Group]:
        """Sample responses to further prompts, and score them while others are generated."""
        config, prompts = self.config, [next(self.online.prompts) for _ in range(count)]
        arguments = (prompts, version, f"step {version}", config.group_size, config.max_new_tokens, config.temperature)
        with GroupScoring(self.rewards) as scoring:
            with self.cluster.phase(self.rollout, "rollout"):
                with progress.phase("responses", count * config.group_size, "responses") as phase:

                    def add(number: int, group: Group) -> None:
                        scoring.add(number, group)
                        phase.advance(len(group))

                    groups = self.rollout.call("rollout", *arguments, on_result=add)
                if is_last:  # now: a reward model's phase may offload the engine
                    self.rollout.call("expect_weights")
            groups = self.finish(scoring, groups)
        if not self.reward_model:
            return [tuple(map(mark_without_result, group)) for group in groups]
        with self.cluster.phase(self.reward_model.role, "reward_model"):
            return self.reward_model.score(groups)

    def _report_equal_rewards(self, version: int, groups: int, reward: float) -> None:
        """Print that the rewards differ within no group. Raises UserError in the first step."""
        message = (
            f"step {version + 1}: in each of {groups} groups all responses have the same reward, "
            f"in {self.config.max_resampling_rounds} rounds (rollout.max_resampling_rounds): "
            f"there is nothing to learn from. The mean reward is {reward:.3g}"
        )
        if version == 0:
            raise UserError(f"{message}: the task is too hard or too easy, or the reward is wrong")
        print(message, flush=True)  # no error later: it also happens when the policy has learned its task
