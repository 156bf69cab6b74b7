"""The rollouts of several steps as the controller uses them: the groups of each step, and slices beside its update."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptf.compute.lease import Lease
from ptf.config import Job
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, Group, Prompt, Trajectory
from ptf.errors import UserError, full_text
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.engines.protocol import Request, Sampling
from ptf.rl.episodes import Episode, play_episode
from ptf.rl.flight_ledger import LEDGER_FILE, FlightLedger
from ptf.rl.flight_state import restore, state_of
from ptf.rl.in_flight import Ask, FlightSettings, InFlight, ages
from ptf.rl.policy.policy import Limits
from ptf.rl.rollout_functions import RolloutFunctions
from ptf.rl.sampler import seed_of

NUM_COMPARED_RESPONSES = 8  # responses in flight whose log-probs engine and trainer compare after a sync


class AsynchronousRollouts:
    """Rollouts in flight over the steps of a run.

    Where policy and engines have devices of their own (`compute.pools`), the slices of an update run beside it;
    otherwise after it. Either way they are the same slices, so that the same bits come out.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        rollout: RoleGroup,
        functions: RolloutFunctions,
        tokenizer: Tokenizer,
        prompts: Callable[[], Prompt],
        run: Path,
        lease: Lease,
    ) -> None:
        self.job, self.cluster, self.rollout, self.functions = job, cluster, rollout, functions
        self.tokenizer, self.prompts, self.run, self.lease = tokenizer, prompts, run, lease
        # another role in the engines' pool would take their devices in the middle of a slice
        self.beside = cluster.pool(rollout.spec.name).roles == {rollout.spec.name}
        self.version = 0  # of the engines' weights
        self.flight = self._in_flight()
        self.ages: Sequence[int] = ()
        self.waits: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, version: int) -> Iterator[list[Group]]:
        """Yield the groups of a step, which are not scored yet; the block scores them and trains the next version.

        Raises what a slice raises, if the block raises nothing.
        """
        self.version = version
        with self.cluster.phase(self.rollout, "rollout"):
            taken = self.flight.take_groups(version, self.prompts)
            if not self.has_update_slices:
                self.rollout.call("expect_weights")
        self.ages = ages(taken, version)
        groups, began = [group.trajectories for group in taken], time.perf_counter()
        if not self.beside:
            yield groups
            self._slices(lambda: False)
            self.waits = {}
            return
        updated = threading.Event()
        with ThreadPoolExecutor(1, "slices") as thread:
            slices = thread.submit(self._slices, lambda: not updated.is_set())
            try:
                yield groups
            except BaseException as error:
                self.flight.abandon()
                updated.set()
                if other := slices.exception():
                    error.add_note(f"a slice beside it failed, too: {full_text(other)}")
                raise
            updated.set()
            done = time.perf_counter()
            ended = slices.result() or began
        self.waits = {"seconds/engine_wait": max(0.0, done - ended), "seconds/weights_wait": max(0.0, ended - done)}
        if seconds := self.flight.slice_seconds:
            self.waits["update_slices_suggested"] = (done - began) / seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the step that has ended."""
        return {"staleness_max": float(max(self.ages)), **self.flight.take_metrics(), **self.waits}

    def responses(self) -> list[np.ndarray]:
        """Return the tokens [T] of responses in flight, with their contexts: of the oldest that have begun, at most
        `NUM_COMPARED_RESPONSES`."""
        parts = (member.begun for group in self.flight.groups for member in group.members)
        begun = (part for part in parts if part and len(part["ids"]))
        return [
            np.concatenate([part["context"], part["ids"]]) for part in itertools.islice(begun, NUM_COMPARED_RESPONSES)
        ]

    def state(self) -> dict[str, Any]:
        """Return the state of the rollouts between two steps."""
        return {**state_of(self.flight), "update_slices": self.flight.settings.update_slices}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises UserError if it had another `rollout.update_slices`."""
        before, now = state["update_slices"], self.flight.settings.update_slices
        if before != now:
            advice = (
                f"give the engines {'a pool' if before else 'no pool'} of their own, as before (compute.pools)"
                if self.flight.settings.wall
                else f"set rollout.update_slices={before}"
            )
            raise UserError(
                f"the checkpoint's run sampled {before} slices beside an update, and this one would sample {now} "
                f"(the default depends on compute.pools); {advice}"
            )
        restore(self.flight, state)
        if self.flight.settings.wall and self.flight.slice and self.flight.ledger.ended(self.flight.slice - 1) is None:
            raise UserError(
                f"{self.flight.ledger.path} does not reach the checkpoint (slice {self.flight.slice}): the file was "
                "lost or damaged; restore it, or begin a run with another name"
            )

    def close(self) -> None:
        """End the episodes that have not ended."""
        self.flight.close()

    @property
    def has_update_slices(self) -> bool:
        """Return whether slices may run between the taking of a step's groups and the loading of its weights."""
        settings = self.flight.settings
        return self.beside if settings.wall else settings.update_slices > 0

    def _slices(self, updating: Callable[[], bool]) -> float | None:
        """Run the slices of an update. Return when they ended; None if there are none."""
        if not self.has_update_slices:
            return None
        with self.cluster.phase(self.rollout, "update_slices"):
            self.flight.beside_update(self.version, self.prompts, updating)
            self.rollout.call("expect_weights")
        return time.perf_counter()

    def _in_flight(self) -> InFlight:
        config = self.job.rollout
        assert config is not None
        prompts, k = config.prompts_per_step, config.max_staleness
        settings = FlightSettings(
            prompts,
            config.group_size,
            k,
            config.slice_tokens,
            config.in_flight or prompts + prompts * k // 2,
            config.generation_batches,
            int(self.beside) if config.update_slices is None else config.update_slices,
            config.environment_slices,
            config.clock == "wall",
        )
        sampling = Sampling(config.max_new_tokens, config.temperature, self.tokenizer.stop_ids)
        limits = Limits(sampling, self.job.data.seq_len)

        def play(prompt: Prompt, admitted: int, i: int, ask: Ask) -> Coroutine[Any, Any, Trajectory]:
            seeds = partial(seed_of, self.job.seed, f"step {admitted}", prompt.index, i)
            episode = Episode(prompt, limits, self.tokenizer, seeds, self.functions.of(prompt.source))
            return play_episode(episode, ask, admitted)

        def serve(batches: list[list[Request]]) -> list[list[Generation]]:
            return self.rollout.call("sample_parts", batches, self.version)

        return InFlight(
            settings, serve, play, self.job.compute.timeout_s, FlightLedger(self.run / LEDGER_FILE, self.lease)
        )
