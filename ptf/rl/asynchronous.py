"""Rollouts in flight over several steps (`rollout.max_staleness`), as the controller uses them."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from ptf.compute.lease import Lease
from ptf.data.trajectory import Group, Prompt, Trajectory
from ptf.errors import UserError, full_text
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.engines.protocol import Sampling
from ptf.rl.episodes import Episode, RolloutFunctions, play_episode
from ptf.rl.flight_ledger import LEDGER_FILE, FlightLedger
from ptf.rl.in_flight import Ask, InFlight
from ptf.rl.online_job import OnlineJob
from ptf.rl.policy.policy import Limits
from ptf.rl.rewards.scoring import GroupScoring
from ptf.rl.rollouts import Rollouts
from ptf.rl.sampler import seed_of

NUM_COMPARED_RESPONSES = 8  # responses in flight whose log-probs engine and trainer compare after a sync


class AsynchronousRollouts(Rollouts):
    """Rollouts in flight over the steps of a run.

    Where policy and engines have devices of their own (`compute.pools`), the slices of an update run beside it;
    otherwise after it. Either way they are the same slices, so that the same bits come out.
    """

    def __init__(self, online: OnlineJob, cluster: Cluster, groups: Mapping[str, RoleGroup], lease: Lease) -> None:
        super().__init__(online, cluster, groups)
        # the environments of training are here, and not in the engines, which may be sampling
        self.functions = RolloutFunctions(online.tokenizer, self.config)
        # another role in the engines' pool would take their devices in the middle of a slice
        self.beside = cluster.pool("rollout").roles == {"rollout"}
        slices = int(self.beside) if self.config.update_slices is None else self.config.update_slices
        self.flight = InFlight(
            self.config,
            slices,
            online.prompts.__next__,
            partial(self.rollout.call, "sample_parts"),
            self._play,
            online.job.compute.timeout_s,
            FlightLedger(online.run / LEDGER_FILE, lease),
        )

    @contextlib.contextmanager
    def step(self, version: int) -> Iterator[tuple[list[Group], dict[str, float]]]:
        """See Rollouts.step. Raises what a slice raises, if the block raises nothing."""
        with self.cluster.phase(self.rollout, "rollout"):
            taken = self.flight.take_groups(version)
            if not self.has_update_slices:
                self.rollout.call("expect_weights")
        with self._slices_beside(version) as waits:
            with GroupScoring(self.rewards) as scoring:
                groups = self.finish(scoring, [group.trajectories for group in taken])
            metrics = self.metrics(groups, version, self.functions.take_retries())
            yield groups, metrics
        metrics["staleness_max"] = float(max(version - group.admitted for group in taken))
        metrics |= self.flight.take_metrics() | waits

    @contextlib.contextmanager
    def _slices_beside(self, version: int) -> Iterator[dict[str, float]]:
        """Run the slices of an update beside a block, or after it; yield metrics that are there when both have
        ended."""
        waits, began = dict[str, float](), time.perf_counter()
        if not self.beside:
            yield waits
            self._slices(version, lambda: False)
            return
        updated = threading.Event()
        with ThreadPoolExecutor(1, "slices") as thread:
            slices = thread.submit(self._slices, version, lambda: not updated.is_set())
            try:
                yield waits
            except BaseException as error:
                self.flight.abandoned = True
                updated.set()
                if other := slices.exception():
                    error.add_note(f"a slice beside it failed, too: {full_text(other)}")
                raise
            updated.set()
            done = time.perf_counter()
            ended = slices.result() or began
        waits |= {"seconds/engine_wait": max(0.0, done - ended), "seconds/weights_wait": max(0.0, ended - done)}
        if serving := self.flight.sums["serving"]:
            waits["update_slices_suggested"] = (done - began) * self.flight.sums["slices"] / serving

    def responses(self) -> list[np.ndarray]:
        """See Rollouts.responses. They are of the oldest that have begun, at most `NUM_COMPARED_RESPONSES`."""
        parts = (member.begun for group in self.flight.groups for member in group.members)
        begun = (part for part in parts if part is not None and len(part.sampled_ids))
        return [
            np.concatenate([part.context, part.sampled_ids]) for part in itertools.islice(begun, NUM_COMPARED_RESPONSES)
        ]

    @override
    def state(self) -> dict[str, Any]:
        return {"in_flight": {**self.flight.state_dict(), "update_slices": self.flight.update_slices}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Rollouts.restore. Raises UserError if it had another `rollout.update_slices`."""
        flight, state, wall = self.flight, state["in_flight"], self.config.clock == "wall"
        before, now = state["update_slices"], flight.update_slices
        if before != now:
            advice = (
                f"give the engines {'a pool' if before else 'no pool'} of their own, as before (compute.pools)"
                if wall
                else f"set rollout.update_slices={before}"
            )
            raise UserError(
                f"the checkpoint's run sampled {before} slices beside an update, and this one would sample {now} "
                f"(the default depends on compute.pools); {advice}"
            )
        flight.load_state_dict(state)
        if wall and flight.slice and flight.slice - 1 not in flight.ledger.ends:
            raise UserError(
                f"{flight.ledger.path} does not reach the checkpoint (slice {flight.slice}): the file was "
                "lost or damaged; restore it, or begin a run with another name"
            )

    @override
    def close(self) -> None:
        self.flight.close()
        self.functions.close()
        super().close()

    @property
    def has_update_slices(self) -> bool:
        """Return whether slices may run between the taking of a step's groups and the loading of its weights."""
        return self.beside if self.config.clock == "wall" else self.flight.update_slices > 0

    def _slices(self, version: int, updating: Callable[[], bool]) -> float | None:
        """Run the slices of an update. Return when they ended; None if there are none."""
        if not self.has_update_slices:
            return None
        with self.cluster.phase(self.rollout, "update_slices"):
            self.flight.beside_update(version, updating)
            self.rollout.call("expect_weights")
        return time.perf_counter()

    def _play(self, prompt: Prompt, admitted: int, i: int, ask: Ask) -> Coroutine[Any, Any, Trajectory]:
        """Play the i-th episode of a prompt that was admitted under a version of the weights."""
        job, tokenizer, config = self.online.job, self.online.tokenizer, self.config
        limits = Limits(Sampling(config.max_new_tokens, config.temperature, tokenizer.stop_ids), job.data.seq_len)
        seeds = partial(seed_of, job.seed, f"step {admitted}", prompt.index, i)
        return play_episode(Episode(prompt, limits, tokenizer, seeds, self.functions.of(prompt.source)), ask, admitted)
