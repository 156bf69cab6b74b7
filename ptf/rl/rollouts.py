"""The rollouts of an online run, as the controller uses them: the groups of each step with their outcomes.

`SynchronousRollouts` is here; `ptf.rl.asynchronous` has those with `rollout.max_staleness`.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ptf.config.sections.rollout import RolloutConfig
from ptf.data.trajectory import Group, NoResult, Reward
from ptf.errors import UserError
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.online_job import OnlineJob
from ptf.rl.rewards.model import RewardModelClient
from ptf.rl.rewards.scoring import GroupScoring, mark_without_result
from ptf.rl.rollout_role import rewards_of
from ptf.workspace import progress


class Rollouts(ABC):
    """Samples and scores the responses of each step."""

    def __init__(self, online: OnlineJob, cluster: Cluster, groups: Mapping[str, RoleGroup]) -> None:
        self.online, self.config, self.cluster, self.rollout = online, online.rollout, cluster, groups["rollout"]
        self.rewards = rewards_of(online.job, self.config.reward)
        self.reward_model = RewardModelClient.of(online.job, online.run, groups.get("reward_model"))
        self.reward_wait = 0.0  # seconds of a step after its last response was there

    @abstractmethod
    def step(self, version: int) -> AbstractContextManager[tuple[list[Group], dict[str, float]]]:
        """Run a block that trains on the groups of a step; the engines have the weights of `version`.

        It gets the groups with their outcomes, and metrics, to which some may be added when the block has ended.
        """

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
        self.rewards.close()

    def finish(self, scoring: GroupScoring, groups: list[Group]) -> list[Group]:
        """Return the groups with their outcomes; a reward model's are still to come."""
        began = time.perf_counter()
        with progress.phase("rewards"):
            groups = scoring.finish(groups)
        self.reward_wait += time.perf_counter() - began
        return groups if self.reward_model else [tuple(map(mark_without_result, group)) for group in groups]

    def metrics(self, groups: list[Group], version: int, environment_retries: int) -> dict[str, float]:
        """Return metrics over the outcomes of all responses of a step, in which so many requests to environments were
        retried."""
        metrics = outcome_metrics(groups, version, self.config, by_source=len(self.online.job.data.sources) > 1)
        metrics["rewards_retried"] = float(environment_retries + self.rewards.take_retries())
        metrics["seconds/reward_wait"], self.reward_wait = self.reward_wait, 0.0
        return metrics


class SynchronousRollouts(Rollouts):
    """Each step waits for all its responses."""

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
        retries = self.rollout.call("take_retries") if self.config.environment else 0
        metrics = self.metrics(sampled, version, retries)
        if not usable and "reward" in metrics:
            self._report_equal_rewards(version, len(sampled), metrics["reward"])
        yield usable or groups, metrics

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
            return groups
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


def rewards_differ(group: Group) -> bool:
    """Return whether the rewards of a group's responses differ, before length penalties and a KL reward."""
    return len({t.outcome.value for t in group if isinstance(t.outcome, Reward)}) > 1


def outcome_metrics(
    groups: Sequence[Group], version: int, config: RolloutConfig, by_source: bool = False
) -> dict[str, float]:
    """Return metrics over the rewards of all responses of a step, which trains the weights of `version`; `by_source`:
    also those of each data source.

    Raises UserError if too many responses have no result.
    """
    trajectories = [t for group in groups for t in group]
    rewards = [(t.prompt.source, t.outcome.value) for t in trajectories if isinstance(t.outcome, Reward)]
    values = np.array([value for _, value in rewards])
    if reasons := [t.outcome.reason for t in trajectories if isinstance(t.outcome, NoResult)]:
        count = f"step {version + 1}: {len(reasons)} of {len(trajectories)} responses have no result"
        first_reason = f"the first reason, from {reward_source(config)}: {reasons[0]}"
        print(f"{count}; {first_reason}", flush=True)
        if len(reasons) > config.max_no_result_share * len(trajectories):
            raise UserError(
                f"{count} (rollout.max_no_result_share is {config.max_no_result_share:g}); {first_reason}. Fix its "
                "cause (ptf try CONFIG plays episodes without training), or raise rollout.max_no_result_share, which "
                "may change on resume"
            )
    versions = [generation.versions for t in trajectories for generation in t.generations]
    if not versions:
        raise UserError(f"step {version + 1}: policy.trajectory(calls=[…]) selected no response to train on")
    truncated = sum(not t.complete for t in trajectories if isinstance(t.outcome, Reward))
    metrics = {"reward": float(values.mean()), "reward_std": float(values.std())} if len(values) else {}
    if by_source:
        metrics |= _means("source_reward", rewards)
    metrics |= {
        "staleness": float((version - np.concatenate(versions)).mean()),
        "no_result_share": len(reasons) / len(trajectories),
        "response_length": float(np.mean([t.num_sampled_tokens for t in trajectories])),
        "truncated_share": truncated / max(len(values), 1),
        "sampled_tokens": float(sum(t.num_sampled_tokens for t in trajectories)),
    }
    if config.is_multi_turn:
        metrics["turns"] = float(np.mean([len(t.generations) for t in trajectories]))
    metrics |= _means("episode", (one for t in trajectories for one in t.counts.items()))
    metrics["zero_variance_share"] = 1 - sum(map(rewards_differ, groups)) / len(groups)
    return metrics


def reward_source(config: RolloutConfig) -> str:
    """Return the name of the reward function, model or environment, for messages."""
    found = ["the harness"] * bool(config.harness)
    found += [f"the rollout function {config.play.use}"] if config.play else []
    if rewards := ", ".join(what.use for what in config.reward.values()):
        found.append(f"the reward {rewards}")
    elif config.reward_model:
        found.append("the reward model")
    return " or ".join(found) or f"the environment {', '.join(what.use for what in config.environment.values())}"


def _means(prefix: str, pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name's values as PREFIX/NAME."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(float(value))
    return {f"{prefix}/{name}": float(np.mean(each)) for name, each in sorted(values.items())}
