"""The online loop, readable as the algorithm. One process runs it and calls role groups; it holds no tensors but what it passes on."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ptf.compute import checkpoint, provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.leave import Requests, passing_on
from ptf.compute.tracking import Tracker
from ptf.config import Job, dump
from ptf.config.schema import LOGPROB_BOUND, PPOAlgo
from ptf.data.sample import Atom
from ptf.data.stream import Stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, NoResult, Prompt, Reward, Trajectory
from ptf.errors import Left, Lost, UserError
from ptf.recipes import Online
from ptf.recipes.grpo import samples_of
from ptf.rl.cluster import Cluster, RoleGroup, table
from ptf.rl.reward_model import Taste
from ptf.rl.rewards import Rewards, score_groups
from ptf.rl.roles import refuse_apart
from ptf.rl.samples import Samples
from ptf.rl.sync import Manifest, Receipt, SyncError
from ptf.rl.transfer import OtherSide, Transfer
from ptf.rl.validate import pass_rates
from ptf.train.resume import refuse_frozen_changes

CRITIC = "critic"  # in a checkpoint
ECHO_S = 8.0  # a death is known within seconds
SYNC = "sync"  # in the run's directory: weights on their way to the engines (rollout.transport: path)


def differs(group: Group) -> bool:
    """Whether its rewards do: from equal ones nothing is learned."""
    return len({t.outcome.value for t in group if isinstance(t.outcome, Reward)}) > 1


class Controller:
    def __init__(
        self, job: Job, recipe: Online, prompts: Stream[Prompt], held_out: dict[str, list[Prompt]], cluster: Cluster,
        *, policy: RoleGroup, rollout: RoleGroup, scorers: Mapping[str, RoleGroup], critic: RoleGroup | None = None,
        rewards: Rewards | None, taste: Taste | None, judge: Rewards | None, made_with: Mapping[str, Any], tokenizer: Tokenizer, run: Path, lease: Lease,
    ) -> None:  # fmt: skip
        assert job.rollout is not None
        assert job.train.steps is not None, "online jobs have no train.epochs"
        self.steps = job.train.steps
        self.tokenizer = tokenizer
        self.job, self.knobs, self.recipe, self.prompts, self.held_out, self.cluster = job, job.rollout, recipe, prompts, held_out, cluster
        self.policy, self.rollout, self.scorers, self.critic, self.rewards = policy, rollout, scorers, critic, rewards
        self.warmup = job.algo.critic_warmup if isinstance(job.algo, PPOAlgo) else 0  # steps of the critic alone
        self.taste = taste
        self.judge = judge or rewards  # of held-out answers
        self.source = (
            f"the reward {rewards.reward.use}"
            if rewards
            else "the reward model"
            if taste
            else f"the environment {job.rollout.environment and job.rollout.environment.use}"
        )
        self.made_with = made_with
        self.bound = self.knobs.max_logprob_diff or LOGPROB_BOUND[job.train.precision]
        self.saves = Checkpoints.of(job, run, lease)
        self.leave, self.directory = Requests(run), run
        self.ahead = recipe.needs_old or self.warmup > 0  # the trainer's log-probs of what was sampled, before anything is made of it
        self.canary: list[np.ndarray] = []
        self.step, manifest = self._restore()
        self.track = Tracker(run, job.track, resumed=self.step, steps=self.steps, lease=lease, said=manifest.get("rows"))
        self.samples = Samples(run, job.track, tokenizer, self.step, lease, manifest.get("samples"))

    def run(self) -> None:
        """x ~ D, y ~ π_old, r(x, y), Â, π ← π + ∇J, π_old ← π, until the last step."""
        with passing_on(self.directory):  # so that another attempt knows of it too
            self._run()

    def _run(self) -> None:
        phase, first = self.cluster.phase, self.step + 1
        self.sync()
        while self.step < self.steps:
            began = time.perf_counter()
            self.cluster.seconds.clear()
            self.cluster.table.clear()
            groups, metrics, reward_s = self.rollouts()
            if self.ahead:
                with phase(self.policy, "logprobs"):
                    groups, difference = self.annotate(groups, self.policy, "old_logprobs")
                refuse_apart(self.step, float(difference.max()), self.bound)
                metrics |= {"logprob_diff": float(difference.max()), "logprob_diff_mean": float(difference.mean())}
            for name, scorer in self.scorers.items():
                with phase(scorer, name):
                    verb = "base_logprobs" if scorer is self.policy else "logprobs"  # LoRA: the policy without its adapters is its reference
                    groups, _ = self.annotate(groups, scorer, f"{name}_logprobs", verb)
            if self.critic:
                with phase(self.critic, "values"):
                    groups, _ = self.annotate(groups, self.critic, "values", "values")
            atoms = self.recipe.credit(groups)
            self.samples.log(self.step + 1, groups, atoms)
            minibatches = self.minibatches(atoms)
            if self.critic:
                with phase(self.critic, "critic"):
                    metrics |= {f"critic_{name}": value for name, value in self.critic.call("update", minibatches, self.step).items()}
            if self.step >= self.warmup:
                with phase(self.policy, "update"):
                    found = self.policy.call("update", minibatches, self.step, None if self.ahead else self.bound)
                metrics |= {name.removeprefix("max_"): value for name, value in found.items()}
            self.step += 1
            metrics |= self.sync()
            if self.held_out and self.job.train.validate_every and self.step % self.job.train.validate_every == 0:
                metrics |= self.validate()
            spent = time.perf_counter() - began
            seconds = {f"seconds/{k}": v for k, v in (self.cluster.seconds | {"reward": reward_s}).items()}
            memory = {f"mem/{turn.role}": turn.gib for turn in sorted(self.cluster.table, key=lambda turn: turn.gib)}  # the most of each
            self.track.log(self.step, metrics | {"tok_s": metrics["generated"] / spent, "step_s": spent} | seconds | memory)
            if self.step == first:
                print(f"step {first}, its phases:\n{table(self.cluster.table)}", flush=True)
            leaving = self.leave.made
            if self.saves.due(self.step) or leaving:
                self.save()
            if leaving and self.step < self.steps:
                raise Left(self.step, self.steps, self.saves.path(self.step))

    def rollouts(self) -> tuple[list[Group], dict[str, float], float]:
        """Scored groups to train on, what the rewards of all answers say, and the seconds that they took. Where groups of equal rewards are replaced
        (DAPO's dynamic sampling), prompts are drawn until as many differ as were asked for, or `rollout.max_rounds` times."""
        knobs, seen, kept, groups, reward_s = self.knobs, list[Group](), list[Group](), list[Group](), 0.0
        for _ in range(knobs.max_rounds if knobs.equal == "replace" else 1):
            prompts = [next(self.prompts) for _ in range(knobs.prompts - len(kept))]
            with self.cluster.phase(self.rollout, "rollout"):
                groups = self.rollout.call("rollout", prompts, self.step, f"step {self.step}", knobs.group, knobs.max_new_tokens, knobs.temperature)
            began = time.perf_counter()
            groups = score_groups(self.rewards, groups)
            reward_s += time.perf_counter() - began
            if self.taste:
                with self.cluster.phase(self.taste.group, "reward model"):
                    groups = self.taste.score(groups)
            seen += groups
            kept += groups if knobs.equal == "keep" else [group for group in groups if differs(group)]
            if len(kept) == knobs.prompts:
                break
        metrics = self.outcomes(seen) | {"asked_again": self.asked_again()}
        if not kept:
            said = (
                f"step {self.step}: in each of {len(seen)} groups all answers have the same reward, in {knobs.max_rounds} rounds (rollout.max_rounds): "
                f"there is nothing to learn from. The mean reward is {metrics['reward']:.3g}"
            )
            if self.step == 0:
                raise UserError(f"{said}: the task is too hard or too easy, or the reward is wrong")
            print(said, flush=True)  # a policy that has learned its task comes here too
        return kept or groups, metrics, reward_s

    def asked_again(self) -> float:
        """How many rewards were asked for once more in this step; of environments, on the first worker, how many turns."""
        if self.knobs.environment:
            return float(self.rollout.call("asked_again"))
        if self.rewards is None:
            return 0.0
        again, self.rewards.again = self.rewards.again, 0
        return float(again)

    def outcomes(self, groups: Sequence[Group]) -> dict[str, float]:
        """What the rewards say. Raises UserError if too many answers have none."""
        every = [t for group in groups for t in group]
        values = np.array([t.outcome.value for t in every if isinstance(t.outcome, Reward)])
        failed = [t.outcome.reason for t in every if isinstance(t.outcome, NoResult)]
        if failed:
            print(f"step {self.step}: {len(failed)} of {len(every)} answers have no result; {self.source} says: {failed[0]}", flush=True)
        if len(failed) > self.knobs.max_no_result * len(every) or not len(values):
            raise UserError(
                f"step {self.step}: {len(failed)} of {len(every)} answers have no reward (rollout.max_no_result is {self.knobs.max_no_result:g}); "
                f"{self.source} says: {failed[0] if failed else 'nothing'}"
            )
        versions = np.concatenate([call.versions for t in every for call in t.calls])
        return {
            "reward": float(values.mean()),
            "reward_std": float(values.std()),
            **self.by_source(every),
            "staleness": float((self.step - versions).mean()),
            "no_result": len(failed) / len(every),
            "length": float(np.mean([t.sampled for t in every])),
            "cut_off": float(np.mean([not t.complete for t in every])),
            "generated": float(sum(t.sampled for t in every)),
            **({"turns": float(np.mean([len(t.calls) for t in every]))} if self.knobs.environment else {}),
            "equal": 1 - sum(map(differs, groups)) / len(groups),
        }

    def annotate(self, groups: Sequence[Group], role: RoleGroup, name: str, verb: str = "logprobs") -> tuple[list[Group], np.ndarray]:
        """Add a role's log-probs of every sampled token as a stream; also |role − engine| of each token."""
        samples = [samples_of(t) for g in groups for t in g]
        found = iter(role.call(verb, [sample for of in samples for sample in of]))
        said = iter([np.concatenate([np.zeros(0, np.float32), *(next(found)[sample.weights != 0] for sample in of)]) for of in samples])
        marked = [tuple(replace(t, streams={**t.streams, name: next(said)}) for t in g) for g in groups]
        difference = np.concatenate([np.abs(t.streams[name] - t.logprobs) for g in marked for t in g])
        return marked, difference

    def minibatches(self, atoms: Sequence[Atom]) -> list[list[Atom]]:
        """What each optimizer step is made from: `epochs` passes in `minibatches` parts, shuffled by (seed, step, epoch)."""
        if not atoms:
            raise UserError(f"step {self.step}: no group has as many answers with a reward as it takes; there is nothing to train on")
        out = []
        for epoch in range(self.recipe.epochs):
            order = np.random.default_rng([self.job.seed, self.step, epoch]).permutation(len(atoms))
            out += [[atoms[i] for i in part] for part in np.array_split(order, min(self.recipe.minibatches, len(atoms)))]
        return out

    def by_source(self, every: Sequence[Trajectory]) -> dict[str, float]:
        """The mean reward of each source's answers that have one, where there are several sources."""
        if len(self.job.data.sources) < 2:
            return {}
        found: dict[str, list[float]] = {}
        for t in every:
            if isinstance(t.outcome, Reward):
                found.setdefault(t.prompt.source, []).append(t.outcome.value)
        return {f"reward/{source}": float(np.mean(values)) for source, values in sorted(found.items())}

    def sync(self) -> dict[str, float]:
        """π_old ← π, verified: digests of what arrives, the version, and what the engine then computes."""
        how = self.knobs.transport
        with self.cluster.phase(self.policy, "sync"):
            self.canary = self.canary or [p.tokens for p in self.canary_prompts()]
            expected = self.policy.call("score", self.canary)
            if how in ("ipc", "nccl"):
                sent, manifest = self.policy.call("lend", how, self.step, self.knobs.workers * self.knobs.tensor, self.job.compute.timeout_s)
            else:
                place = str(self.directory / SYNC) if how == "path" else None
                sent, manifest = self.policy.call("weights", self.step, place, self.knobs.lora == "adapter")
        if how in ("ipc", "nccl"):
            with self.cluster.together(self.policy, self.rollout, "sync"):
                receipt = self.streamed(sent, manifest)
        else:
            with self.cluster.phase(self.rollout, "sync"):
                receipt = self.rollout.call("load", sent, manifest)
        with self.cluster.phase(self.rollout, "sync"):
            worst = self.rollout.call("canary", self.canary, expected, self.bound)
        if receipt.version != self.step or receipt.tensors != len(manifest.digests):
            raise SyncError(f"step {self.step}: the engine acknowledged version {receipt.version} with {receipt.tensors} tensors of {len(manifest.digests)}")
        return {"sync_tensors": float(receipt.tensors), "canary_diff": worst}

    def streamed(self, sent: Transfer, manifest: Manifest) -> Receipt:
        """What the policy sends while the engines read it. Where one side fails the other has `ECHO_S` to say why, and who failed by itself is named."""
        beside = ThreadPoolExecutor(2)
        try:
            both = [beside.submit(self.policy.call, "send", self.step), beside.submit(self.rollout.call, "receive", sent, manifest)]
            wait(both, return_when=FIRST_EXCEPTION)
            wait(both, timeout=ECHO_S)
            failed = [error for one in both if one.done() and (error := one.exception())]
            if failed:
                raise min(failed, key=lambda error: (not isinstance(error, Lost), isinstance(error, OtherSide)))
            return both[1].result()
        finally:
            beside.shutdown(wait=False)  # who still waits is ended with its process

    def canary_prompts(self) -> list[Prompt]:
        """Four prompts, taken without moving the stream."""
        state = self.prompts.state_dict()
        taken = [next(self.prompts) for _ in range(4)]
        self.prompts.load_state_dict(state)
        return taken

    def validate(self) -> dict[str, float]:
        with self.cluster.phase(self.rollout, "validate"):
            found: dict[str, float] = {}
            for name, prompts in self.held_out.items():
                rates, _ = pass_rates(
                    self.rollout, self.judge, prompts, self.step, f"validate {name}", samples=0, temperature=1.0,
                    max_new_tokens=min(self.job.evaluate.max_new_tokens, self.job.data.seq_len - max(len(p.tokens) for p in prompts)),
                    max_no_result=self.knobs.max_no_result,
                )  # fmt: skip
                found |= {f"{key}/{name}": value for key, value in rates.items()}
            return found

    def save(self) -> None:
        path = self.saves.begin(self.step)
        with self.cluster.phase(self.policy, "save"):
            entries = self.policy.call("save", path)
        if self.critic:
            with self.cluster.phase(self.critic, "save"):
                entries |= {f"{CRITIC}/{name}": entry for name, entry in self.critic.call("save", f"{path}/{CRITIC}").items()}
        state = {"prompts": self.prompts.state_dict(), "canary": self.canary, "stops": list(self.tokenizer.stop_ids)}
        entries["controller.pt"] = checkpoint.save_host(f"{path}/controller.pt", state)
        manifest = {"job": dump(self.job), "metrics": {}, "made_with": self.made_with, "rows": self.track.rows.state}
        self.saves.commit(self.step, entries, manifest | ({"samples": self.samples.rows.state} if self.samples.rows else {}))

    def _restore(self) -> tuple[int, Mapping[str, Any]]:
        """The steps that are done, and the manifest of the checkpoint; nothing, if there is none."""
        found = self.saves.latest()
        if found is None:
            return 0, {}
        step, path, manifest = found
        refuse_frozen_changes(manifest["job"], self.job)
        provenance.refuse_other(manifest["made_with"], self.made_with, path, self.job.checkpoint.accept_changes, tell=True)
        with self.cluster.phase(self.policy, "load"):
            self.policy.call("load", path)
        if self.critic:
            with self.cluster.phase(self.critic, "load"):
                self.critic.call("load", f"{path}/{CRITIC}")
        state = checkpoint.load_host(f"{path}/controller.pt")
        self.tokenizer.refuse_other_stops(state["stops"], path)
        self.prompts.load_state_dict(state["prompts"])
        self.canary = state["canary"]
        self.saves.prune(step)
        print(f"resumed from {path} (step {step} of {self.steps})", flush=True)
        return step, manifest

    def close(self) -> None:
        self.track.close()
        self.samples.close()
        for rewards in (self.rewards, self.judge):
            if rewards:
                rewards.close()
