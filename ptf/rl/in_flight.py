"""Rollouts in flight: groups whose responses are generated over several versions of the weights, on a virtual clock.

Time is counted in slices. In a slice every response that is being generated gets at most `slice_tokens` further tokens,
all under one version of the weights; between two slices, and only there, prompts are admitted, batches are taken, and
weights change. A response that is cut at the end of a slice goes on in the next one as a request whose context is its
context and what was sampled, with the same random numbers at an offset. So the tokens and their versions are a function
of the config, the seed and the weights, and not of the speed of engines, environments or rewards.

The bits of log-probs depend on the batch in which a response is computed. Responses are therefore dealt to `batches`
fixed batches by the number of their group; a batch of a slice is submitted whole, in the order of (group, response),
and repeated whole if its engine is lost.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, Group, Prompt, Trajectory
from ptf.errors import UserError
from ptf.rl.engines.protocol import Request
from ptf.rl.event_loop import EventLoop

Serve = Callable[[list[list[Request]]], list[list[Generation]]]  # the batches of a slice → what was sampled for each
Ask = Callable[[Request], Coroutine[Any, Any, Generation]]
PlayMember = Callable[[Prompt, int, int, Ask], Coroutine[Any, Any, Trajectory]]


@dataclass(frozen=True)
class Clock:
    """The settings of the virtual clock."""

    prompts: int  # groups of a batch
    group_size: int
    max_staleness: int  # k: the largest age of a group, in versions, when it is trained
    slice_tokens: int
    in_flight: int  # most groups that are admitted and not taken; between `prompts` and `prompts` · (1 + k)
    batches: int
    update_slices: int = 0  # slices under the old weights between the take of a batch and the weights trained on it
    environment_slices: int = 0  # slices that an environment has for its answer, beside the one in which it was asked


@dataclass(eq=False)
class Pending:
    """A request of an episode that waits for its response, and what was sampled of it in earlier slices."""

    request: Request
    response: "asyncio.Future[Generation]"
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def part(self, slice_tokens: int) -> Request:
        """Return the request for the next slice."""
        sampling = self.request.sampling
        left = sampling.max_new_tokens - len(self.ids)
        return replace(
            self.request,
            context=np.concatenate([self.request.context, self.ids]),
            sampling=replace(sampling, max_new_tokens=min(left, slice_tokens)),
            offset=self.request.offset + len(self.ids),
        )

    def add(self, part: Generation) -> Generation | None:
        """Add what a slice sampled; return the whole response if it has ended."""
        self.ids = np.concatenate([self.ids, part.sampled_ids])
        self.logprobs = np.concatenate([self.logprobs, part.logprobs])
        self.versions = np.concatenate([self.versions, part.versions])
        if not part.finished and len(self.ids) < self.request.sampling.max_new_tokens:
            return None
        return Generation(self.request.context, self.ids, self.logprobs, self.versions, part.finished)


@dataclass(eq=False)
class Member:
    """One episode of a group."""

    heard: list[Generation] = field(default_factory=list)  # the whole responses so far
    started: dict[str, np.ndarray] = field(default_factory=dict)  # restored: the context and parts of the next response
    pending: Pending | None = None
    due: int = 0  # the slice that needs what the episode does after its last response; not before it does that count
    trajectory: Trajectory | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def is_thinking(self) -> bool:
        """Return whether the episode has neither ended nor asked the policy."""
        return self.trajectory is None and self.pending is None


@dataclass(eq=False)
class FlyingGroup:
    """A prompt that was admitted, and the episodes of its group."""

    number: int  # of the admission
    prompt: Prompt
    admitted: int  # version of the weights at the admission: that of its oldest token; it keys the seeds
    members: list[Member]
    ended: int | None = None  # the slice in which its last episode ended

    @property
    def trajectories(self) -> Group:
        """Return its episodes, all of which have ended."""
        return tuple(member.trajectory for member in self.members if member.trajectory is not None)


class InFlight:
    """The groups that are admitted and not taken.

    `serve` samples the batches of a slice with the engines. `play` plays an episode: it is called with the prompt, the
    version at its admission, the number of the response in its group, and what answers its requests. Episodes that
    neither end nor ask the policy for `timeout_s` seconds end the run.
    """

    def __init__(self, clock: Clock, serve: Serve, play: PlayMember, timeout_s: float) -> None:
        self.clock, self.serve, self.play, self.timeout_s = clock, serve, play, timeout_s
        self.groups: list[FlyingGroup] = []
        self.slice = 0  # the number of the next one
        self.admissions = self.next_step = 0
        self.loop = EventLoop()
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

    def close(self) -> None:
        """Cancel the episodes that have not ended."""
        self.loop.close()

    def batch(self, step: int, prompts: Callable[[], Prompt]) -> list[FlyingGroup]:
        """Return the groups that are trained in a step, after as many slices as they need; new prompts are admitted.

        `step` is the version of the engines' weights.
        """
        self.next_step = step
        while (chosen := self.takeable(step)) is None:
            if not self.advance(step, prompts):
                raise AssertionError("all groups have ended, and no batch can be formed of them")
        taken = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in taken]
        self.next_step = step + 1
        return chosen

    def room(self, version: int) -> int:
        """Return up to how many groups in flight prompts are admitted under a version.

        Each must be trained in time. While a batch is trained, the next version is near: a group that begins before it
        has one step less, so for one step fewer prompts are admitted than could be.
        """
        steps = version + self.clock.max_staleness - self.next_step + (version == self.next_step)
        return min(self.clock.in_flight, self.clock.prompts * steps)

    def takeable(self, step: int) -> list[FlyingGroup] | None:
        """Return the batch of a step; None if it cannot be formed before a further slice.

        It has the groups that have ended, oldest first (by version, slice of their end and admission). A group must be
        trained at an age of at most `max_staleness`, now or, as the batches after this one have room, later: if one
        that must be in this batch has not ended, none is formed.
        """
        size, last = self.clock.prompts, self.clock.max_staleness  # a group of version v may be trained until v + last
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

    def beside_update(self, version: int, prompts: Callable[[], Prompt]) -> None:
        """Run the slices of an update (`update_slices`), under the version that the engines have until it is loaded."""
        for _ in range(self.clock.update_slices):
            self.advance(version, prompts)

    def advance(self, version: int, prompts: Callable[[], Prompt]) -> bool:
        """Admit prompts and run one slice under a version: every response that is generated gets its next part.

        Returns whether a group had not ended.
        """
        while len(self.groups) < self.room(version):
            self._admit(prompts(), version)
        flying = any(group.ended is None for group in self.groups)
        self.loop.run(self._wait_for_due())
        dealt: list[list[tuple[Member, Pending]]] = [[] for _ in range(self.clock.batches)]
        for group in self.groups:
            for member in group.members:
                if member.pending and member.due <= self.slice:
                    dealt[group.number % self.clock.batches].append((member, member.pending))
        full = [batch for batch in dealt if batch]
        parts_of = [[one.part(self.clock.slice_tokens) for _, one in batch] for batch in full]
        began = time.perf_counter()
        sampled = self.serve(parts_of) if full else []
        self.serving += time.perf_counter() - began
        for batch, parts in zip(full, sampled, strict=True):
            for (member, one), part in zip(batch, parts, strict=True):
                self.tokens += len(part.sampled_ids)
                if whole := one.add(part):
                    member.pending = None
                    member.heard.append(whole)
                    member.due = self.slice + 1 + self.clock.environment_slices
                    one.response.set_result(whole)
        self.slots += self.clock.slice_tokens * self.clock.in_flight * self.clock.group_size
        self.slice += 1
        self.slices += 1
        self.loop.run(self._wait_for_due())
        for group in self.groups:
            if group.ended is None and all(m.trajectory is not None and m.due <= self.slice for m in group.members):
                group.ended = self.slice - 1
        return flying

    async def _wait_for_due(self) -> None:
        """Wait until every episode that is due has ended or waits for the policy."""
        for group in self.groups:
            for i, member in enumerate(group.members):
                if member.trajectory is None and member.task is None:
                    member.task = asyncio.create_task(self._play(group, i))
        began = asyncio.get_running_loop().time()
        until = began + self.timeout_s
        while thinking := [m for g in self.groups for m in g.members if m.is_thinking and m.due <= self.slice]:
            for member in thinking:
                if member.task is not None and member.task.done():
                    member.task.result()  # raises the fault that is no result of the episode
            self.changed.clear()
            left = until - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self.changed.wait(), max(0.0, left))
            except TimeoutError:
                raise TimeoutError(
                    f"{len(thinking)} episodes neither ended nor asked the policy within {self.timeout_s:g} s "
                    "(compute.timeout_s)"
                ) from None
        self.waited += asyncio.get_running_loop().time() - began

    async def _play(self, group: FlyingGroup, i: int) -> None:
        member, number = group.members[i], 0

        async def ask(request: Request) -> Generation:
            nonlocal number
            if member.pending:
                raise UserError(
                    "rollout.max_staleness: an episode made a request while the one before it was answered; with the "
                    "virtual clock it may have one at a time"
                )
            mine, number = number, number + 1
            if mine < len(member.heard):  # before the run was continued
                raise_if_other_context(request, member.heard[mine].context, group.prompt)
                return member.heard[mine]
            parts, member.started = member.started, {}
            if parts:
                raise_if_other_context(request, parts["context"], group.prompt)
            sampled = {name: part for name, part in parts.items() if name != "context"}
            member.pending = Pending(request, asyncio.get_running_loop().create_future(), **sampled)
            self.changed.set()
            return await member.pending.response

        try:
            member.trajectory = await self.play(group.prompt, group.admitted, i, ask)
        finally:
            self.changed.set()

    def _admit(self, prompt: Prompt, version: int) -> None:
        members = [Member(due=self.slice) for _ in range(self.clock.group_size)]
        self.groups.append(FlyingGroup(self.admissions, prompt, version, members))
        self.admissions += 1


def raise_if_other_context(request: Request, context: np.ndarray, prompt: Prompt) -> None:
    """Raise UserError if an episode that is played again asks otherwise than before the run was continued."""
    if not np.array_equal(request.context, context):
        raise UserError(
            f"an episode of prompt {prompt.index} of {prompt.source} asked the policy otherwise than before the run "
            "was continued: its environment does not repeat (ptf try finds that), so with rollout.max_staleness it "
            "cannot be resumed"
        )


def ages(groups: Sequence[FlyingGroup], step: int) -> list[int]:
    """Return the age of each group that is trained in a step: its version less that of the group's oldest token."""
    return [step - group.admitted for group in groups]
