"""The online training loop, written as the algorithm.

One process runs the loop and calls the role groups, which do the computation; it has only the tensors that it passes
from role to role.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptf.compute import checkpoint, provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.shutdown import StopSignal, passing_on
from ptf.compute.tracking import StepLines, Tracker
from ptf.config import Job, dump
from ptf.config.logprob_limits import LogprobLimits
from ptf.data.sample import PackUnit
from ptf.data.stream import Stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, NoResult, Prompt, Reward, Trajectory, last_sample_of, samples_of, token_column
from ptf.errors import Lost, Stopped, UserError
from ptf.recipes.protocol import OnlineRecipe, bootstraps_truncated
from ptf.rl.asynchronous import AsynchronousRollouts
from ptf.rl.cluster import Cluster, RoleGroup, phase_table
from ptf.rl.logprob_guard import LogprobDifference
from ptf.rl.online_saver import CONTROLLER_FILE, OnlineSaver
from ptf.rl.response_log import ResponseLog
from ptf.rl.rewards.by_source import GroupScoring, Rewards, mark_without_result
from ptf.rl.rewards.model import RewardModelClient
from ptf.rl.rollout_functions import RolloutFunctions
from ptf.rl.validate import pass_rates
from ptf.rl.weights.transport import transport_of
from ptf.rl.weights.verification import SyncError
from ptf.train.resume import raise_if_fixed_keys_changed
from ptf.workspace import progress

CRITIC = "critic"  # the critic's directory in a checkpoint
MOST_SKIPPED = 10  # steps in a row that train nothing, before the run ends


def rewards_differ(group: Group) -> bool:
    """Return whether the rewards of a group's responses differ, before length penalties and a KL reward."""
    return len({t.outcome.value for t in group if isinstance(t.outcome, Reward)}) > 1


def _means(prefix: str, pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name's values as PREFIX/NAME."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(float(value))
    return {f"{prefix}/{name}": float(np.mean(each)) for name, each in sorted(values.items())}


class Controller:
    """The loop of an online recipe: rollouts, rewards, advantages, updates, and weight sync."""

    def __init__(
        self,
        job: Job,
        recipe: OnlineRecipe,
        prompts: Stream[Prompt],
        held_out: dict[str, list[Prompt]],
        cluster: Cluster,
        *,
        policy: RoleGroup,
        rollout: RoleGroup,
        logprob_models: Mapping[str, RoleGroup],
        critic: RoleGroup | None = None,
        rewards: Rewards | None,
        reward_model: RewardModelClient | None,
        validation_rewards: Rewards | None,
        functions: RolloutFunctions | None = None,
        logprob_limits: LogprobLimits,
        made_with: Mapping[str, Any],
        tokenizer: Tokenizer,
        run: Path,
        lease: Lease,
    ) -> None:
        assert job.rollout is not None
        assert job.train.steps is not None, "online jobs have no train.epochs"
        self.job, self.rollout_config, self.recipe = job, job.rollout, recipe
        self.steps = job.train.steps
        self.prompts, self.held_out, self.tokenizer = prompts, held_out, tokenizer
        self.cluster, self.policy, self.rollout = cluster, policy, rollout
        self.logprob_models, self.critic = logprob_models, critic
        self.rewards, self.reward_model = rewards, reward_model
        self.validation_rewards = validation_rewards or rewards
        self.warmup = recipe.critic.warmup if recipe.critic else 0  # steps in which only the critic is trained
        self.made_with = made_with
        self.logprob_limits = logprob_limits
        self.directory, self.transport = run, transport_of(job, run, cluster.gpu)
        self.saves = Checkpoints.of(job, run, lease)
        trained = {"": policy} | ({CRITIC: critic} if critic else {})
        self.saver = OnlineSaver(self.saves, cluster, trained, job.compute.timeout_s)
        self.stop_signal = StopSignal(run)
        # whether the trainer computes the log-probs of the sampled tokens before the update
        stale = job.rollout.max_staleness > 0  # then only tokens of the newest weights can be compared
        self.needs_old_logprobs = recipe.needs_old_logprobs or self.warmup > 0 or stale
        self.canary: list[np.ndarray] = []
        self.functions = functions
        self.asynchronous = (
            AsynchronousRollouts(job, cluster, rollout, functions, tokenizer, partial(next, prompts), run, lease)
            if functions
            else None
        )
        self.skipped = 0  # steps in a row without a response to train on
        self.step, manifest = self._restore()
        self.track = Tracker(
            run, job.track, resumed=self.step, steps=self.steps, lease=lease, expected=manifest.get("rows")
        )
        self.timeline = StepLines(run / "timeline.jsonl", self.step, lease)
        self.samples = ResponseLog(run, job.track, tokenizer, self.step, lease, manifest.get("samples"))

    def run(self) -> None:
        """Train until the last step: x ~ D, y ~ π_engine, r(x, y), Â, π ← π + ∇J, π_engine ← π."""
        with passing_on(self.directory):  # SIGTERM becomes a file, so that no further attempt starts
            try:
                self._run()
            except Exception as error:
                if not isinstance(error, Lost):  # then the process that writes may be gone, or hang
                    self.saver.close()
                raise

    def _run(self) -> None:
        first = self.step + 1
        self.sync()
        while self.step < self.steps:
            began = time.perf_counter()
            self.cluster.seconds.clear()
            self.cluster.table.clear()
            with self.asynchronous.step(self.step) if self.asynchronous else nullcontext() as sampled:
                groups, metrics, reward_s = self.scored(sampled) if sampled else self.rollouts()
                self.saver.commit_if_written()
                groups, difference = self.logprobs_and_values(groups)
                units = self.recipe.compute_advantages(groups)
                self.samples.log(self.step + 1, groups, units)
                metrics |= difference | self.update(units)
            metrics |= self.asynchronous.take_metrics() if self.asynchronous else {}
            self.step += 1
            metrics |= self.sync()
            if self.held_out and self.job.train.validate_every and self.step % self.job.train.validate_every == 0:
                metrics |= self.validate()
            self._log(metrics, began, reward_s)
            self.saver.commit_if_written()
            if self.step == first:
                print(f"step {first}, its phases:\n{phase_table(self.cluster.table)}", flush=True)
            leaving = self.stop_signal.is_set
            if self.saves.due(self.step) or leaving:
                self.save()
            if leaving or self.step == self.steps:
                self.saver.wait()
            if leaving and self.step < self.steps:
                raise Stopped(self.step, self.steps, self.saves.path(self.step))

    def scored(self, groups: list[Group]) -> tuple[list[Group], dict[str, float], float]:
        """Return what `rollouts` returns, of groups that were sampled."""
        began = time.perf_counter()
        with GroupScoring(self.rewards) as scoring:
            groups = scoring.finish(groups)
        groups = [tuple(map(mark_without_result, group)) for group in groups]
        reward_s = time.perf_counter() - began
        return groups, self.outcome_metrics(groups) | {"rewards_retried": self.take_retries()}, reward_s

    def rollouts(self) -> tuple[list[Group], dict[str, float], float]:
        """Sample responses and score them.

        Returns the groups to train on, metrics over the rewards of all responses, and the seconds that scoring took
        after the last response was there. With `rollout.max_resampling_rounds` (the dynamic sampling of DAPO), prompts
        are drawn until the rewards differ within each of `rollout.prompts_per_step` groups, in at most so many rounds.
        """
        rollout_config, reward_s = self.rollout_config, 0.0
        sampled, usable, groups = list[Group](), list[Group](), list[Group]()
        rounds = rollout_config.max_resampling_rounds or 1
        for number in range(rounds):
            prompts = [next(self.prompts) for _ in range(rollout_config.prompts_per_step - len(usable))]
            sampling_arguments = (rollout_config.group_size, rollout_config.max_new_tokens, rollout_config.temperature)
            with GroupScoring(self.rewards) as scoring:
                with self.cluster.phase(self.rollout, "rollout"):
                    arguments = ("rollout", prompts, self.step, f"step {self.step}", *sampling_arguments)
                    with progress.phase("responses", len(prompts) * rollout_config.group_size, "responses") as phase:

                        def add(number: int, group: Group, phase: progress.Phase = phase) -> None:
                            scoring.add(number, group)
                            phase.advance(len(group))

                        groups = self.rollout.call(*arguments, on_result=add)
                    if number == rounds - 1:  # now: a reward model's phase may offload the engine
                        self.rollout.call("expect_weights")
                began = time.perf_counter()
                with progress.phase("rewards"):
                    groups = scoring.finish(groups)
                reward_s += time.perf_counter() - began
            if self.reward_model:
                with self.cluster.phase(self.reward_model.role, "reward_model"):
                    groups = self.reward_model.score(groups)
            else:
                groups = [tuple(map(mark_without_result, group)) for group in groups]
            sampled += groups
            resamples = rollout_config.max_resampling_rounds > 0
            usable += [group for group in groups if rewards_differ(group)] if resamples else groups
            if len(usable) == rollout_config.prompts_per_step:
                if number < rounds - 1:
                    self.rollout.call("expect_weights")
                break
        metrics = self.outcome_metrics(sampled) | {"rewards_retried": self.take_retries()}
        if not usable and "reward" in metrics:
            self._report_equal_rewards(len(sampled), metrics["reward"])
        return usable or groups, metrics, reward_s

    def _report_equal_rewards(self, groups: int, reward: float) -> None:
        """Print that the rewards differ within no group. Raises UserError in the first step."""
        message = (
            f"step {self.step + 1}: in each of {groups} groups all responses have the same reward, "
            f"in {self.rollout_config.max_resampling_rounds} rounds (rollout.max_resampling_rounds): "
            f"there is nothing to learn from. The mean reward is {reward:.3g}"
        )
        if self.step == 0:
            raise UserError(f"{message}: the task is too hard or too easy, or the reward is wrong")
        print(message, flush=True)  # no error later: it also happens when the policy has learned its task

    def take_retries(self) -> float:
        """Return how many rewards, and how many requests to environments, were retried since the last call."""
        retried = 0.0 if self.rewards is None else float(self.rewards.take_retries())
        if self.functions:  # then the environments of training are here, and the engines may be sampling
            return retried + self.functions.take_retries()
        if self.rollout_config.environment:
            retried += float(self.rollout.call("take_retries"))
        return retried

    def outcome_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics over the rewards of all responses. Raises UserError if too many responses have no result."""
        trajectories = [t for group in groups for t in group]
        values = np.array([t.outcome.value for t in trajectories if isinstance(t.outcome, Reward)])
        reasons = [t.outcome.reason for t in trajectories if isinstance(t.outcome, NoResult)]
        first_reason = f"the first reason, from {self.reward_source()}: {reasons[0] if reasons else 'none is known'}"
        if reasons:
            print(
                f"step {self.step + 1}: {len(reasons)} of {len(trajectories)} responses have no result; {first_reason}",
                flush=True,
            )
        if len(reasons) > self.rollout_config.max_no_result_share * len(trajectories):
            raise UserError(
                f"step {self.step + 1}: {len(reasons)} of {len(trajectories)} responses have no result "
                f"(rollout.max_no_result_share is {self.rollout_config.max_no_result_share:g}); {first_reason}. Fix "
                "its cause (ptf try CONFIG plays episodes without training), or raise "
                "rollout.max_no_result_share, which may change on resume"
            )
        versions = [generation.versions for t in trajectories for generation in t.generations]
        if not versions:
            raise UserError(f"step {self.step + 1}: policy.trajectory(calls=[…]) selected no response to train on")
        return {
            **({"reward": float(values.mean()), "reward_std": float(values.std())} if len(values) else {}),
            **self.reward_by_source(trajectories),
            "staleness": float((self.step - np.concatenate(versions)).mean()),
            "no_result_share": len(reasons) / len(trajectories),
            "response_length": float(np.mean([t.num_sampled_tokens for t in trajectories])),
            "truncated_share": sum(not t.complete for t in trajectories if isinstance(t.outcome, Reward))
            / max(len(values), 1),
            "sampled_tokens": float(sum(t.num_sampled_tokens for t in trajectories)),
            **(
                {"turns": float(np.mean([len(t.generations) for t in trajectories]))}
                if self.rollout_config.is_multi_turn
                else {}
            ),
            **self.episode_counts(trajectories),
            "zero_variance_share": 1 - sum(map(rewards_differ, groups)) / len(groups),
        }

    @staticmethod
    def episode_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the means of what episodes count, over those that count it."""
        return _means("episode", (one for t in trajectories for one in t.counts.items()))

    def reward_source(self) -> str:
        """Return the name of the reward function, model or environment, for messages."""
        config = self.rollout_config
        found = ["the harness"] * bool(config.harness)
        found += [f"the rollout function {config.play.use}"] if config.play else []
        if self.rewards or self.reward_model:
            found.append(f"the reward {self.rewards.name}" if self.rewards else "the reward model")
        names = (what.use for what in config.environment.values())
        return " or ".join(found) or f"the environment {', '.join(names)}"

    def reward_by_source(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the mean reward of each data source; empty if there is only one source."""
        if len(self.job.data.sources) < 2:
            return {}
        rewards = ((t.prompt.source, t.outcome.value) for t in trajectories if isinstance(t.outcome, Reward))
        return _means("source_reward", rewards)

    def logprobs_and_values(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        """Add the values per sampled token that the recipe needs: old log-probs, frozen models' log-probs, values.

        Also returns metrics of the difference between the engine's and the trainer's log-probs, if the trainer's are
        computed. Raises SyncError if they exceed the limits of the section `rollout`.
        """
        metrics: dict[str, float] = {}
        if self.needs_old_logprobs:
            with self.cluster.phase(self.policy, "logprobs"):
                groups, differences = self.add_token_column(groups, self.policy, "old_logprobs")
            versions = np.concatenate([one.versions for g in groups for t in g for one in t.generations])
            # those of earlier weights differ by the updates
            if len(newest := differences[versions == self.step]):
                difference = LogprobDifference.of(newest, self.logprob_limits.threshold)
                what = f"step {self.step + 1}: the engine's and the trainer's log-probs of the sampled tokens"
                difference.raise_if_beyond(self.logprob_limits, what)
                metrics = difference.metrics()
        for name, model in self.logprob_models.items():
            with self.cluster.phase(model, name):
                # with LoRA, the policy without its adapters is its own reference
                method = "base_logprobs" if model is self.policy else "logprobs"
                groups, _ = self.add_token_column(groups, model, f"{name}_logprobs", method)
        if self.critic:
            with self.cluster.phase(self.critic, "values"):
                groups, _ = self.add_token_column(groups, self.critic, "values", "values")
                if bootstraps_truncated(self.recipe):
                    groups = self.add_values_after(groups, self.critic)
        return groups, metrics

    def add_values_after(self, groups: Sequence[Group], critic: RoleGroup) -> list[Group]:
        """Add the critic's value of the state after the last token to the episodes that were truncated at a limit."""

        def is_truncated(t: Trajectory) -> bool:
            return not t.complete and t.num_sampled_tokens > 0

        samples = [last_sample_of(t) for group in groups for t in group if is_truncated(t)]
        values = iter(critic.call("last_values", samples) if samples else [])
        return [tuple(replace(t, value_after=next(values)) if is_truncated(t) else t for t in g) for g in groups]

    def add_token_column(
        self, groups: Sequence[Group], role: RoleGroup, name: str, method: str = "logprobs"
    ) -> tuple[list[Group], np.ndarray]:
        """Add a role's values per sampled token as the token column `name`; also return |role − engine| of each."""
        trajectories = [t for g in groups for t in g]
        samples = [samples_of(t) for t in trajectories]
        values = iter(role.call(method, list(itertools.chain(*samples))))
        token_columns = [
            token_column(t, [next(values) for _ in its_samples])
            for t, its_samples in zip(trajectories, samples, strict=True)
        ]
        rest = iter(token_columns)
        extended = [tuple(replace(t, token_columns={**t.token_columns, name: next(rest)}) for t in g) for g in groups]
        difference = np.concatenate([np.abs(t.token_columns[name] - t.logprobs) for g in extended for t in g])
        return extended, difference

    def update(self, units: Sequence[PackUnit]) -> dict[str, float]:
        """Train the critic, and after its warm-up the policy; without a response to train on, nothing. Raises UserError
        in the tenth step in a row that trains nothing."""
        self.skipped = 0 if units else self.skipped + 1
        if not units:
            self._report_skipped()
            return {"skipped": 1.0}
        metrics: dict[str, float] = {}
        minibatches = self.minibatches(units)
        if self.critic:
            with self.cluster.phase(self.critic, "critic"):
                results = self.critic.call("update", minibatches, self.step)
            metrics |= {f"critic_{name}": value for name, value in results.items()}
        if self.step >= self.warmup:
            limits = None if self.needs_old_logprobs else self.logprob_limits
            with self.cluster.phase(self.policy, "update"):
                results = self.policy.call("update", minibatches, self.step, limits)
            metrics |= results
        return metrics

    def _report_skipped(self) -> None:
        """Print that a step trains nothing. Raises UserError if it is one of too many in a row."""
        reason = (
            f"step {self.step + 1}: no group has as many responses with a reward as the recipe needs, or "
            "algo.overlong_filter leaves out all, because they were truncated at a limit (truncated_share)"
        )
        if self.skipped == MOST_SKIPPED:
            raise UserError(
                f"{reason}, in {MOST_SKIPPED} steps in a row: mend the cause of missing rewards (lines above), or "
                "raise rollout.max_new_tokens or turn off algo.overlong_filter, which may change on resume"
            )
        print(f"{reason}: nothing is trained", flush=True)

    def minibatches(self, units: Sequence[PackUnit]) -> list[list[PackUnit]]:
        """Return the data of each optimizer step: `update_epochs` passes in `num_minibatches` parts, shuffled by (seed,
        step, epoch)."""
        out = []
        for epoch in range(self.recipe.update_epochs):
            order = np.random.default_rng([self.job.seed, self.step, epoch]).permutation(len(units))
            for part in np.array_split(order, min(self.recipe.num_minibatches, len(units))):
                out.append([units[i] for i in part])
        return out

    def sync(self) -> dict[str, float]:
        """Copy the policy's weights to the engines, π_engine ← π, and verify them.

        The digests of the received tensors, the version, and the engine's log-probs of fixed prompts are verified,
        and of some responses in flight.
        Raises SyncError if one of them is wrong.
        """
        with self.cluster.phase(self.policy, "sync"):
            if not self.canary:
                self.canary = [p.tokens for p in self.canary_prompts()]
                self.policy.call("compare_with_transformers", self.canary[0])
            in_flight = self.asynchronous.responses() if self.asynchronous else []
            scored = [*self.canary, *in_flight]
            expected = self.policy.call("prompt_logprobs", scored)
            weights, manifest = self.transport.open(self.policy, self.step)
        receipt = self.transport.send(self.cluster, self.policy, self.rollout, weights, manifest)
        with self.cluster.phase(self.rollout, "sync"):
            worst = self.rollout.call("canary", scored, expected, self.logprob_limits)
        if receipt.version != self.step or receipt.tensors != len(manifest.digests):
            raise SyncError(
                f"step {self.step}: the engine acknowledged version {receipt.version} with {receipt.tensors} tensors "
                f"of {len(manifest.digests)}"
            )
        metrics = {"sync_tensors": float(receipt.tensors), "canary_logprob_diff_max": worst}
        return metrics | ({"canary_responses": float(len(in_flight))} if self.asynchronous else {})

    def canary_prompts(self) -> list[Prompt]:
        """Return four prompts without advancing the stream."""
        state = self.prompts.state_dict()
        prompts = [next(self.prompts) for _ in range(4)]
        self.prompts.load_state_dict(state)
        return prompts

    def validate(self) -> dict[str, float]:
        """Return pass rates on the held-out prompts."""
        metrics: dict[str, float] = {}
        with self.cluster.phase(self.rollout, "validate"):
            for name, prompts in self.held_out.items():
                room = self.job.data.seq_len - max(len(p.tokens) for p in prompts)
                rates, _ = pass_rates(
                    self.rollout,
                    self.validation_rewards,
                    prompts,
                    self.step,
                    f"validate {name}",
                    samples=0,
                    temperature=1.0,
                    max_new_tokens=min(self.job.evaluate.max_new_tokens, room),
                    max_no_result_share=self.rollout_config.max_no_result_share,
                )
                metrics |= {f"{key}/{name}": value for key, value in rates.items()}
        return metrics

    def _log(self, metrics: dict[str, float], began: float, reward_s: float) -> None:
        """Write the step's metrics with the seconds of each phase and the peak memory of each role; and when each phase
        was, in seconds since the step began, to `timeline.jsonl`."""
        step_s = time.perf_counter() - began
        table = sorted(self.cluster.table, key=lambda phase: phase.start)
        spans = [[p.role, p.phase, round(p.start - began, 4), round(p.start - began + p.seconds, 4)] for p in table]
        self.timeline.add({"step": self.step, "seconds": round(step_s, 4), "phases": spans})
        phases = self.cluster.seconds | {"reward_wait": reward_s}
        seconds = {f"seconds/{name}": value for name, value in phases.items()}
        # sorted by memory, so that the largest value of each role is written last and remains
        memory = {
            f"peak_memory_gib/{phase.role}": phase.gib
            for phase in sorted(self.cluster.table, key=lambda phase: phase.gib)
        }
        speed = {"step_tokens_per_s": metrics["sampled_tokens"] / step_s, "step_s": step_s}
        if rollout_s := phases.get("rollout", 0.0) + phases.get("update_slices", 0.0):
            speed["rollout_tokens_per_s"] = metrics["sampled_tokens"] / rollout_s
        self.track.log(self.step, metrics | speed | seconds | memory)

    def save(self) -> None:
        """Begin to write a checkpoint of the finished step."""
        state = {"prompts": self.prompts.state_dict(), "canary": self.canary, "stops": list(self.tokenizer.stop_ids)}
        state["skipped"] = self.skipped
        if self.asynchronous:
            state["in_flight"] = self.asynchronous.state()
        manifest = {"job": dump(self.job), "metrics": {}, "made_with": self.made_with, "rows": self.track.lines.state}
        if self.samples.lines:
            manifest["samples"] = self.samples.lines.state
        self.saver.begin(self.step, state, manifest)

    def _restore(self) -> tuple[int, Mapping[str, Any]]:
        """Load the newest checkpoint. Return its step and manifest; (0, {}) if there is none."""
        newest = self.saves.latest()
        if newest is None:
            return 0, {}
        step, path, manifest = newest
        raise_if_fixed_keys_changed(manifest["job"], self.job)
        provenance.raise_if_different(
            manifest["made_with"], self.made_with, path, self.job.checkpoint.accept_version_changes, tell=True
        )
        with self.cluster.phase(self.policy, "load"):
            self.policy.call("load", path)
        if self.critic:
            with self.cluster.phase(self.critic, "load"):
                self.critic.call("load", f"{path}/{CRITIC}")
        state = checkpoint.load_host(f"{path}/{CONTROLLER_FILE}")
        self.tokenizer.raise_if_other_stops(state["stops"], path)
        self.prompts.load_state_dict(state["prompts"])
        self.canary = state["canary"]
        self.skipped = state["skipped"]
        if self.asynchronous:
            self.asynchronous.restore(state["in_flight"])
        self.saves.prune(step)
        print(f"resumed from {path} (step {step} of {self.steps})", flush=True)
        return step, manifest

    def close(self) -> None:
        """Close the logs, end what is in flight, and the processes of rewards and environments."""
        if self.asynchronous:
            self.asynchronous.close()
        if self.functions:
            self.functions.close()
        self.timeline.close()
        self.track.close()
        self.samples.close()
        for rewards in (self.rewards, self.validation_rewards):
            if rewards:
                rewards.close()
