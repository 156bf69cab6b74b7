"""Rollouts in flight: groups whose responses are generated over several versions of the weights.

Time is counted in slices. In a slice every response that is being generated gets at most `slice_tokens` further tokens,
all under one version of the weights; between two slices, and only there, prompts are admitted, the groups of a step
are taken, and weights change. A response that has not ended at the end of a slice goes on in the next one as a request
whose context is its context and what was sampled, with the same random numbers at an offset. With the virtual clock the
tokens and their versions are therefore a function of the config, the seed and the weights, and not of the speed of
engines, environments or rewards; with the wall clock they also depend on the ledger (ptf/rl/slice_clock.py).

The bits of log-probs depend on the batch in which a response is computed. Responses are therefore dealt to
`generation_batches` fixed batches by the number of their group; a batch of a slice is submitted whole, in the order of
(group, response), and repeated whole if its engine is lost.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ptf.data.trajectory import Generation, NoResult, Prompt, Trajectory
from ptf.errors import UserError
from ptf.rl.engines.protocol import Request
from ptf.rl.event_loop import EventLoop
from ptf.rl.flight_ledger import FlightLedger
from ptf.rl.in_flight_group import InFlightGroup, Member, Pending
from ptf.rl.slice_clock import VirtualClock, WallClock

T = TypeVar("T")
Serve = Callable[[list[list[Request]]], list[list[Generation]]]  # the batches of a slice → what was sampled for each
Ask = Callable[[Request], Coroutine[Any, Any, Generation]]
PlayMember = Callable[[Prompt, int, int, Ask], Coroutine[Any, Any, Trajectory]]


@dataclass(frozen=True)
class FlightSettings:
    """The settings of rollouts in flight."""

    groups_per_step: int
    group_size: int
    max_staleness: int  # k: the largest age of a group, in versions, when it is trained
    slice_tokens: int
    # most groups that are admitted and not taken; between `groups_per_step` and `groups_per_step` · (1 + k)
    in_flight: int
    generation_batches: int  # into how many batches the responses of a slice are divided
    update_slices: int = 0  # slices under the old weights after the groups of a step were taken, while they are trained
    environment_slices: int = 0  # slices that an environment has for its answer, beside the one in which it was asked
    wall: bool = False  # slices take the requests that have arrived, and a ledger has them; the two numbers are unused


class InFlight:
    """The groups that are admitted and not taken.

    `serve` samples the batches of a slice with the engines. `play` plays an episode: it is called with the prompt, the
    version at its admission, the number of the response in its group, and what answers its requests. Episodes that
    neither end nor ask the policy for `timeout_s` seconds end the run.
    """

    def __init__(
        self,
        settings: FlightSettings,
        serve: Serve,
        play: PlayMember,
        timeout_s: float,
        ledger: FlightLedger | None = None,
    ) -> None:
        self.settings, self.serve, self.play, self.timeout_s = settings, serve, play, timeout_s
        self.ledger = ledger or FlightLedger(None)
        self.clock = WallClock(self.ledger) if settings.wall else VirtualClock(settings.update_slices)
        self.groups: list[InFlightGroup] = []
        self.slice = 0  # the number of the next one
        self.admissions = self.next_step = 0
        self.loop = EventLoop(own_thread=True)  # slices run in two threads, and episodes in one
        self.abandoned = False
        self.changed = asyncio.Event()  # an episode has asked the policy, or ended
        # since the metrics were taken: tokens, places for them, slices, seconds of waiting for an environment and of
        # sampling
        self.tokens = self.slots = self.slices = 0
        self.waited = self.serving = 0.0

    @property
    def slice_seconds(self) -> float:
        """Return the mean seconds of a slice since the metrics were taken."""
        return self.serving / self.slices if self.slices else 0.0

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the slices since the last call."""
        found = {
            "groups_in_flight": float(len(self.groups)),
            "slices": float(self.slices),
            "slice_occupancy": self.tokens / self.slots if self.slots else 0.0,
            "seconds/environment_wait": self.waited,
        }
        self.tokens = self.slots = self.slices = 0
        self.waited = self.serving = 0.0
        return found

    def abandon(self) -> None:
        """Begin no further slice beside an update, which has failed."""
        self.abandoned = True

    def close(self) -> None:
        """Cancel the episodes that have not ended.

        The first fault of an episode was raised; those of others are dropped here. Otherwise asyncio would report each
        of them whenever the garbage collector finds it.
        """
        self.loop.close()
        for group in self.groups:
            for member in group.members:
                if member.task is not None and member.task.done() and not member.task.cancelled():
                    member.task.exception()

    def take_groups(self, step: int, prompts: Callable[[], Prompt]) -> list[InFlightGroup]:
        """Take the groups that are trained in a step, after as many slices as they need; new prompts are admitted.

        `step` is the version of the engines' weights.
        """
        self.next_step = step
        while (chosen := self.takeable(step)) is None:
            if not self.advance(step, prompts):
                raise AssertionError("all groups have ended, and those of a step cannot be chosen")
        taken = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in taken]
        self.next_step = step + 1
        return chosen

    def room(self, version: int) -> int:
        """Return the largest number of groups in flight up to which prompts are admitted under a version.

        A group that is admitted under version v is trained in step v + `max_staleness` at the latest, and a step trains
        `groups_per_step` groups. While a step is trained (`version` < `next_step`), groups for one step fewer than that
        are admitted, because a group that is admitted after the weights have changed has one step more.
        """
        steps = version + self.settings.max_staleness - self.next_step + (version == self.next_step)
        return min(self.settings.in_flight, self.settings.groups_per_step * steps)

    def takeable(self, step: int) -> list[InFlightGroup] | None:
        """Return the groups of a step; None if a further slice is needed first.

        They are `groups_per_step` of the groups that have ended, oldest first (by version, slice of their end, and
        number). No group may be older than `max_staleness` when it is trained, and a step trains `groups_per_step`
        groups; so if a group that has not ended would have to be in this step, the step waits for it.
        """
        # a group of version v may be trained until v + last
        size, last = self.settings.groups_per_step, self.settings.max_staleness
        ended = [group for group in self.groups if group.ended is not None]
        chosen = sorted(ended, key=lambda group: (group.admitted, group.ended, group.number))[:size]
        if len(chosen) < size:
            return None
        for later in range(last + 1):
            due = sum(group.admitted + last <= step + later for group in self.groups)
            here = sum(group.admitted + last <= step + later for group in chosen)
            if here < due - size * later:
                return None
        return chosen

    def beside_update(self, version: int, prompts: Callable[[], Prompt], updating: Callable[[], bool]) -> None:
        """Run the slices of an update, under the version that the engines have until it is loaded; `updating` returns
        whether it goes on."""
        number = 0
        while not self.abandoned and self.clock.has_slice(self.slice, version, number, updating):
            self.advance(version, prompts, updating)
            number += 1

    def advance(self, version: int, prompts: Callable[[], Prompt], updating: Callable[[], bool] | None = None) -> bool:
        """Admit prompts and run one slice under a version: every response that is generated gets its next part.

        Returns whether a group had not ended.
        """
        while len(self.groups) < self.room(version):
            self._admit(prompts(), version)
        flying = any(group.ended is None for group in self.groups)
        members = self.loop.run(self._timed(self.clock.to_compute(self, version, updating)))
        dealt: list[list[tuple[Member, Pending]]] = [[] for _ in range(self.settings.generation_batches)]
        for number, member in members:
            assert member.pending is not None
            dealt[number % self.settings.generation_batches].append((member, member.pending))
        full = [batch for batch in dealt if batch]
        parts_of = [[one.part(self.settings.slice_tokens) for _, one in batch] for batch in full]
        began = time.perf_counter()
        sampled = self.serve(parts_of) if full else []
        self.serving += time.perf_counter() - began
        for batch, parts in zip(full, sampled, strict=True):
            for (member, one), part in zip(batch, parts, strict=True):
                self.tokens += len(part.sampled_ids)
                if whole := one.add(part):
                    member.pending = None
                    member.responses.append(whole)
                    member.due = self.slice + 1 + self.settings.environment_slices
                    one.response.set_result(whole)
        self.slots += self.settings.slice_tokens * self.settings.in_flight * self.settings.group_size
        self.slice += 1
        self.slices += 1
        for member in self.loop.run(self._timed(self.clock.ended(self))):
            member.end_counts = True
        for group in self.groups:
            if group.ended is None and not group.in_flight:
                group.ended = self.slice - 1
        return flying

    async def until(self, waited: Callable[[], Sequence[Member]], poll_s: float | None = None) -> None:
        """Wait until there is none of these episodes; `waited` is called again when an episode has asked the policy or
        ended, and every `poll_s` seconds. Raises what an episode raised, and TimeoutError."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.timeout_s
        while awaiting := waited():
            for member in awaiting:
                if member.task is not None and member.task.done():
                    member.task.result()  # raises the fault that is no result of the episode
            self.changed.clear()
            left = ends - loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), max(0.0, min(left, poll_s or left)))
            if loop.time() >= ends:
                raise TimeoutError(
                    f"{len(awaiting)} episodes neither ended nor asked the policy within {self.timeout_s:g} s "
                    "(compute.timeout_s)"
                )

    async def _timed(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Begin the episodes that were admitted, and wait; the seconds are kept."""
        for group in self.groups:
            for i, member in enumerate(group.members):
                if member.trajectory is None and member.task is None:
                    member.task = asyncio.create_task(self._play(group, i))
                if member.task is not None and member.task.done():
                    member.task.result()  # raises the fault that is no result of the episode
        began = time.perf_counter()
        found = await waiting
        self.waited += time.perf_counter() - began
        return found

    async def _play(self, group: InFlightGroup, i: int) -> None:
        """Play an episode to its end; one without a result ends in the ledger first."""
        member, number = group.members[i], 0
        decided = self.ledger.no_result(group.number, i, group.prompt)
        over, gave_up = asyncio.Event(), asyncio.Event()

        async def ask(request: Request) -> Generation:
            nonlocal number
            if member.pending:
                raise UserError(
                    "rollout.max_staleness: an episode made a request while the one before it was answered; with "
                    "asynchronous rollouts it may have one at a time"
                )
            mine, number = number, number + 1
            if decided and mine >= decided.responses:
                over.set()
                await asyncio.Event().wait()  # until it is cancelled
            if mine < len(member.responses):  # before the run was continued
                raise_if_other_context(request, member.responses[mine].context, group.prompt)
                return member.responses[mine]
            parts, member.started = member.started, {}
            if parts:
                raise_if_other_context(request, parts["context"], group.prompt)
            sampled = {name: part for name, part in parts.items() if name != "context"}
            member.pending = Pending(request, asyncio.get_running_loop().create_future(), **sampled)
            self.changed.set()
            try:
                whole = await member.pending.response
            except asyncio.CancelledError:
                gave_up.set()
                raise
            if decided and number >= decided.responses:
                over.set()
            return whole

        try:
            playing = asyncio.ensure_future(self.play(group.prompt, group.admitted, i, ask))
            if decided:
                if decided.responses:
                    ending = asyncio.ensure_future(over.wait())
                    await asyncio.wait({playing, ending}, return_when=asyncio.FIRST_COMPLETED)
                    ending.cancel()
                    if playing.done():
                        playing.result()  # raises what is no result of the episode
                playing.cancel()
                member.trajectory = decided.trajectory
                return
            try:
                trajectory = await playing
            finally:
                playing.cancel()
            if gave_up.is_set():
                raise UserError(
                    "rollout.max_staleness: an episode gave up a request that was being answered (a deadline around "
                    "policy.generate?); with asynchronous rollouts it waits for its response"
                )
            if number < len(member.responses) or member.started:
                raise other_request(group.prompt)
            if isinstance(trajectory.outcome, NoResult):
                self.ledger.write_no_result(group.number, i, len(member.responses), trajectory)
            member.trajectory = trajectory
        finally:
            self.changed.set()

    def _admit(self, prompt: Prompt, version: int) -> None:
        members = [Member(due=self.slice) for _ in range(self.settings.group_size)]
        self.groups.append(InFlightGroup(self.admissions, prompt, version, members))
        self.admissions += 1


def raise_if_other_context(request: Request, context: np.ndarray, prompt: Prompt) -> None:
    """Raise UserError if an episode that is played again asks otherwise than before the run was continued."""
    if not np.array_equal(request.context, context):
        raise other_request(prompt)


def other_request(prompt: Prompt) -> UserError:
    """Return the error of an episode that asks otherwise, or ends earlier, than before the run was continued."""
    return UserError(
        f"after the resume, an episode of prompt {prompt.index} of {prompt.source} sent another request to the "
        "policy than before: its environment is not deterministic (take all randomness from its seed; ptf try "
        "checks that), so with rollout.max_staleness the run cannot be continued"
    )


def ages(groups: Sequence[InFlightGroup], step: int) -> list[int]:
    """Return the age of each group that is trained in a step: its version less that of the group's oldest token."""
    return [step - group.admitted for group in groups]
