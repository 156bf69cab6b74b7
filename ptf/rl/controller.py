"""The online training loop, written as the algorithm.

One process runs the loop and calls the role groups, which do the computation; it has only the tensors that it passes
from role to role.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ptf.compute import checkpoint, provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.shutdown import is_asked_to_stop, sigterm_stops
from ptf.compute.tracking import StepLines, Tracker
from ptf.config import dump, loads, raise_if_fixed_keys_changed
from ptf.data.document import PackUnit
from ptf.data.trajectory import Group, Trajectory, last_sample_of, samples_of, token_column
from ptf.errors import Lost, Stopped, UserError
from ptf.rl.asynchronous import AsynchronousRollouts
from ptf.rl.cluster import Cluster, RoleGroup, phase_table
from ptf.rl.online_job import OnlineJob
from ptf.rl.online_saver import CONTROLLER_FILE, OnlineSaver
from ptf.rl.response_log import ResponseLog
from ptf.rl.rollout_role import evaluation_rewards
from ptf.rl.rollouts import SynchronousRollouts
from ptf.rl.validate import pass_rates
from ptf.rl.weights.transport import transport_of
from ptf.rl.weights.verification import SAMPLED_TOKENS, LogprobDifference, SyncError

CRITIC = "critic"  # the critic's directory in a checkpoint
MOST_SKIPPED = 10  # steps in a row that train nothing, before the run ends


class Controller:
    """The loop of an online recipe: rollouts, rewards, advantages, updates, and weight sync.

    `groups` are the job's roles by name. The newest checkpoint of the run is loaded, if there is one.
    """

    def __init__(self, online: OnlineJob, cluster: Cluster, groups: Mapping[str, RoleGroup], lease: Lease) -> None:
        job, run, recipe = online.job, online.run, online.recipe
        assert job.train.steps is not None, "online jobs have no train.epochs"
        self.online, self.job, self.recipe, self.cluster, self.lease = online, job, recipe, cluster, lease
        self.steps, self.prompts, self.limits = job.train.steps, online.prompts, online.limits
        self.policy, self.rollout, self.critic = groups["policy"], groups["rollout"], groups.get("critic")
        # with LoRA, the policy without its adapters is its own reference
        self.logprob_models = {role: groups.get(role, self.policy) for role in recipe.frozen_models}
        self.warmup = recipe.critic.warmup if recipe.critic else 0  # steps in which only the critic is trained
        packages = online.made_with["packages"] | self.policy.call("kernels")
        self.made_with = {**online.made_with, "packages": packages}
        if online.rollout.max_staleness:
            self.rollouts = AsynchronousRollouts(online, cluster, groups, lease)
        else:
            self.rollouts = SynchronousRollouts(online, cluster, groups)
        self.validation_rewards = evaluation_rewards(job) if job.evaluate.reward else self.rollouts.rewards
        self.transport = transport_of(job, run, cluster.gpu)
        self.saves = Checkpoints.of(job, run, lease)
        trained = {"": self.policy} | ({CRITIC: self.critic} if self.critic else {})
        self.saver = OnlineSaver(self.saves, cluster, trained, job.compute.timeout_s)
        # whether the trainer computes the log-probs of the sampled tokens before the update; of stale tokens only those
        # of the newest weights can be compared
        self.needs_old_logprobs = recipe.needs_old_logprobs or self.warmup > 0 or online.rollout.max_staleness > 0
        self.canary: list[np.ndarray] = []
        self.skipped = 0  # steps in a row without a response to train on
        self.step, manifest = self._restore()
        self.track = Tracker(
            run, job.track, resumed=self.step, steps=self.steps, lease=lease, expected=manifest.get("rows")
        )
        self.timeline = StepLines(run / "timeline.jsonl", self.step, lease)
        self.samples = ResponseLog(run, job.track, online.tokenizer, self.step, lease, manifest.get("samples"))

    def run(self) -> None:
        """Train until the last step: x ~ D, y ~ π_engine, r(x, y), Â, π ← π + ∇J, π_engine ← π. Then write
        `run/model`, a Hugging Face directory, and what it was made with."""
        with sigterm_stops(self.online.run):  # SIGTERM becomes a file, so that no further attempt starts
            try:
                self._run()
            except Exception as error:
                if not isinstance(error, Lost):  # then the process that writes may be gone, or hang
                    self.saver.close()
                raise
        with self.cluster.phase(self.policy, "export"):
            self.lease.check()
            provenance.write(self.online.run, self.made_with)
            self.policy.call("export", str(self.online.run / "model"))

    def _run(self) -> None:
        first = self.step + 1
        self.sync()
        while self.step < self.steps:
            began = time.perf_counter()
            self.cluster.table.clear()
            with self.rollouts.step(self.step) as (groups, metrics):
                self.saver.commit_if_written()
                groups, difference = self.logprobs_and_values(groups)
                units = self.recipe.compute_advantages(groups)
                self.samples.log(self.step + 1, groups, units)
                metrics |= difference | self.update(units)
            self.step += 1
            metrics |= self.sync()
            if self.online.held_out and self.step % self.job.train.validate_every == 0:
                metrics |= self.validate()
            self._log(metrics, began)
            self.saver.commit_if_written()
            if self.step == first:
                print(f"step {first}, its phases:\n{phase_table(self.cluster.table)}", flush=True)
            self.save_if_due()

    def save_if_due(self) -> None:
        """Begin to write a checkpoint of the finished step, where one is due. Raises Stopped after a request to
        stop."""
        leaving = is_asked_to_stop(self.online.run)
        if self.saves.due(self.step) or leaving:
            state = {
                "prompts": self.prompts.state_dict(),
                "canary": self.canary,
                "stops": list(self.online.tokenizer.stop_ids),
                "skipped": self.skipped,
                **self.rollouts.state(),
            }
            rows = self.track.lines.state
            manifest = {"job": dump(self.job), "metrics": {}, "made_with": self.made_with, "rows": rows}
            if self.samples.lines:
                manifest["samples"] = self.samples.lines.state
            self.saver.begin(self.step, state, manifest)
        if leaving or self.step == self.steps:
            self.saver.wait()
        if leaving and self.step < self.steps:
            raise Stopped(self.step, self.steps, self.saves.path(self.step))

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
                difference = LogprobDifference.of(newest, self.limits.threshold)
                difference.raise_if_beyond(self.limits, f"step {self.step + 1}: {SAMPLED_TOKENS}")
                metrics = difference.metrics()
        for name, model in self.logprob_models.items():
            with self.cluster.phase(model, name):
                method = "base_logprobs" if model is self.policy else "logprobs"
                groups, _ = self.add_token_column(groups, model, f"{name}_logprobs", method)
        if self.critic:
            with self.cluster.phase(self.critic, "values"):
                groups, _ = self.add_token_column(groups, self.critic, "values", "values")
                if self.recipe.critic and self.recipe.critic.bootstrap_truncated:
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
        columns = [token_column(t, [next(values) for _ in own]) for t, own in zip(trajectories, samples, strict=True)]
        rest = iter(columns)
        extended = [tuple(replace(t, token_columns={**t.token_columns, name: next(rest)}) for t in g) for g in groups]
        pairs = zip(columns, trajectories, strict=True)
        return extended, np.concatenate([np.abs(column - t.logprobs) for column, t in pairs])

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
            limits = None if self.needs_old_logprobs else self.limits
            with self.cluster.phase(self.policy, "update"):
                metrics |= self.policy.call("update", minibatches, self.step, limits)
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
            if not self.canary:  # four prompts, without advancing the stream
                state = self.prompts.state_dict()
                self.canary = [next(self.prompts).tokens for _ in range(4)]
                self.prompts.load_state_dict(state)
                self.policy.call("compare_with_transformers", self.canary[0])
            in_flight = self.rollouts.responses()
            scored = [*self.canary, *in_flight]
            expected = self.policy.call("prompt_logprobs", scored)
            weights, manifest = self.transport.open(self.policy, self.step)
        receipt = self.transport.send(self.cluster, self.policy, self.rollout, weights, manifest)
        with self.cluster.phase(self.rollout, "sync"):
            worst = self.rollout.call("canary", scored, expected, self.limits)
        if receipt.version != self.step or receipt.tensors != len(manifest.digests):
            raise SyncError(
                f"step {self.step}: the engine acknowledged version {receipt.version} with {receipt.tensors} tensors "
                f"of {len(manifest.digests)}"
            )
        metrics = {"sync_tensors": float(receipt.tensors), "canary_logprob_diff_max": worst}
        return metrics | ({"canary_responses": float(len(in_flight))} if self.online.rollout.max_staleness else {})

    def validate(self) -> dict[str, float]:
        """Return pass rates on the held-out prompts."""
        metrics: dict[str, float] = {}
        with self.cluster.phase(self.rollout, "validate"):
            for name, prompts in self.online.held_out.items():
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
                    max_no_result_share=self.online.rollout.max_no_result_share,
                )
                metrics |= {f"{key}/{name}": value for key, value in rates.items()}
        return metrics

    def _log(self, metrics: dict[str, float], began: float) -> None:
        """Write the step's metrics with the seconds of each phase and the peak memory of each role; and when each phase
        was, in seconds since the step began, to `timeline.jsonl`."""
        step_s = time.perf_counter() - began
        table = sorted(self.cluster.table, key=lambda phase: phase.start)
        spans = [[p.role, p.phase, round(p.start - began, 4), round(p.start - began + p.seconds, 4)] for p in table]
        self.timeline.add({"step": self.step, "seconds": round(step_s, 4), "phases": spans})
        phases = dict[str, float]()
        for one in table:
            phases[one.phase] = phases.get(one.phase, 0.0) + one.seconds
        seconds = {f"seconds/{name}": value for name, value in phases.items()}
        # sorted by memory, so that the largest value of each role is written last and remains
        memory = {f"peak_memory_gib/{one.role}": one.gib for one in sorted(table, key=lambda one: one.gib)}
        speed = {"step_tokens_per_s": metrics["sampled_tokens"] / step_s, "step_s": step_s}
        if rollout_s := phases.get("rollout", 0.0) + phases.get("update_slices", 0.0):
            speed["rollout_tokens_per_s"] = metrics["sampled_tokens"] / rollout_s
        self.track.log(self.step, metrics | speed | seconds | memory)

    def _restore(self) -> tuple[int, Mapping[str, Any]]:
        """Load the newest checkpoint. Return its step and manifest; (0, {}) if there is none."""
        if (newest := self.saves.latest()) is None:
            return 0, {}
        step, path, manifest = newest
        raise_if_fixed_keys_changed(loads(manifest["job"]), self.job)
        provenance.raise_if_different(
            manifest["made_with"], self.made_with, path, self.job.checkpoint.accept_version_changes, tell=True
        )
        for directory, role in self.saver.roles.items():
            with self.cluster.phase(role, "load"):
                role.call("load", f"{path}/{directory}".rstrip("/"))
        state = checkpoint.load_host(f"{path}/{CONTROLLER_FILE}")
        self.online.tokenizer.raise_if_other_stops(state["stops"], path)
        self.prompts.load_state_dict(state["prompts"])
        self.canary, self.skipped = state["canary"], state["skipped"]
        self.rollouts.restore(state)
        self.saves.prune(step)
        print(f"resumed from {path} (step {step} of {self.steps})", flush=True)
        return step, manifest

    def close(self) -> None:
        """Close the logs, end what is in flight, and the processes of rewards and environments."""
        self.rollouts.close()
        for each in (self.timeline.file, self.track, self.samples, self.validation_rewards):
            each.close()
