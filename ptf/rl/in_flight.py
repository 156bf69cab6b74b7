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
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ptf.config.sections.rollout import RolloutConfig
from ptf.data.trajectory import Generation, NoResult, Prompt, Trajectory
from ptf.errors import UserError
from ptf.rl.engines.protocol import NOTHING, Request
from ptf.rl.event_loop import EventLoop
from ptf.rl.flight_ledger import Decided, FlightLedger
from ptf.rl.in_flight_group import EpisodeInFlight, InFlightGroup, Pending, trajectory_state
from ptf.rl.slice_clock import VirtualClock, WallClock

T = TypeVar("T")
Ask = Callable[[Request], Coroutine[Any, Any, Generation]]


class InFlight:
    """The groups that are admitted and not taken.

    `update_slices` is the number of slices beside an update, by the virtual clock. `next_prompt` returns a further
    prompt. `serve` samples the batches of a slice with the engines, under a version of the weights. `play` plays an
    episode: it is called with the prompt, the version at its admission, the number of the response in its group, and
    what answers its requests.
    Episodes that neither end nor ask the policy for `timeout_s` seconds end the run.
    """

    def __init__(
        self,
        config: RolloutConfig,
        update_slices: int,
        next_prompt: Callable[[], Prompt],
        serve: Callable[[list[list[Request]], int], list[list[Generation]]],
        play: Callable[[Prompt, int, int, Ask], Coroutine[Any, Any, Trajectory]],
        timeout_s: float,
        ledger: FlightLedger,
    ) -> None:
        self.config, self.update_slices, self.next_prompt = config, update_slices, next_prompt
        self.serve, self.play, self.timeout_s, self.ledger = serve, play, timeout_s, ledger
        # most groups that are admitted and not taken
        self.most = config.in_flight or config.prompts_per_step * (2 + config.max_staleness) // 2
        self.clock = WallClock(self.ledger) if config.clock == "wall" else VirtualClock(update_slices)
        self.groups: list[InFlightGroup] = []
        self.slice = 0  # the number of the next one
        self.admissions = self.next_step = 0
        self.loop = EventLoop(own_thread=True)  # slices run in two threads, and episodes in one
        self.abandoned = False  # True: the update has failed, and no further slice begins beside it
        self.changed = asyncio.Event()  # an episode has asked the policy, or ended
        # since the metrics were taken: tokens, slots for them, slices; seconds that an environment was waited for, and
        # of sampling (serving)
        self.sums = defaultdict[str, float](float)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the slices since the last call."""
        sums, self.sums = self.sums, defaultdict(float)
        return {
            "groups_in_flight": float(len(self.groups)),
            "slices": sums["slices"],
            "slice_occupancy": sums["tokens"] / (sums["slots"] or 1),
            "seconds/environment_wait": sums["waited"],
        }

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two slices."""
        return {
            "slice": self.slice,
            "admissions": self.admissions,
            "next_step": self.next_step,
            "groups": [group.state() for group in self.groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.slice, self.admissions, self.next_step = state["slice"], state["admissions"], state["next_step"]
        self.groups = [InFlightGroup.restored(group) for group in state["groups"]]

    def take_groups(self, step: int) -> list[InFlightGroup]:
        """Take the groups that are trained in a step, after as many slices as they need; new prompts are admitted.

        `step` is the version of the engines' weights.
        """
        self.next_step = step
        while (chosen := self.takeable(step)) is None:
            if not self.advance(step):
                raise AssertionError("all groups have ended, and those of a step cannot be chosen")
        self.groups = [group for group in self.groups if group not in chosen]
        self.next_step = step + 1
        return chosen

    def room(self, version: int) -> int:
        """Return the largest number of groups in flight up to which prompts are admitted under a version.

        A group that is admitted under version v is trained in step v + `max_staleness` at the latest, and a step trains
        `prompts_per_step` groups. While a step is trained (`version` < `next_step`), groups for one step fewer are
        admitted, because a group that is admitted after the weights have changed has one step more.
        """
        steps = version + self.config.max_staleness - self.next_step + (version == self.next_step)
        return min(self.most, self.config.prompts_per_step * steps)

    def takeable(self, step: int) -> list[InFlightGroup] | None:
        """Return the groups of a step; None if a further slice is needed first.

        They are `prompts_per_step` of the groups that have ended, oldest first (by version, slice of their end, and
        number). No group may be older than `max_staleness` when it is trained, and a step trains `prompts_per_step`
        groups; so if a group that has not ended would have to be in this step, the step waits for it.
        """
        # a group of version v may be trained until v + last
        size, last = self.config.prompts_per_step, self.config.max_staleness
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

    def beside_update(self, version: int, updating: Callable[[], bool]) -> None:
        """Run the slices of an update, under the version that the engines have until it is loaded; `updating` returns
        whether it goes on."""
        number = 0
        while not self.abandoned and self.clock.has_slice(self.slice, version, number, updating):
            self.advance(version, updating)
            number += 1

    def advance(self, version: int, updating: Callable[[], bool] | None = None) -> bool:
        """Admit prompts and run one slice under a version: every response that is generated gets its next part.

        Returns whether a group had not ended.
        """
        while len(self.groups) < self.room(version):
            members = [EpisodeInFlight(due=self.slice) for _ in range(self.config.group_size)]
            self.groups.append(InFlightGroup(self.admissions, self.next_prompt(), version, members))
            self.admissions += 1
        flying = any(group.ended is None for group in self.groups)
        members = self.loop.run(self._timed(self.clock.to_compute(self, version, updating)))
        dealt: list[list[tuple[EpisodeInFlight, Pending]]] = [[] for _ in range(self.config.generation_batches)]
        for number, member in members:
            assert member.pending is not None
            dealt[number % self.config.generation_batches].append((member, member.pending))
        full = [batch for batch in dealt if batch]
        parts_of = [[one.part(self.config.slice_tokens) for _, one in batch] for batch in full]
        began = time.perf_counter()
        sampled = self.serve(parts_of, version) if full else []
        self.sums["serving"] += time.perf_counter() - began
        for batch, parts in zip(full, sampled, strict=True):
            for (member, one), part in zip(batch, parts, strict=True):
                self.sums["tokens"] += len(part.sampled_ids)
                if whole := one.add(part):
                    member.pending = None
                    member.responses.append(whole)
                    member.due = self.slice + 1 + self.config.environment_slices
                    one.response.set_result(whole)
        self.sums["slots"] += self.config.slice_tokens * self.most * self.config.group_size
        self.slice += 1
        self.sums["slices"] += 1
        for member in self.loop.run(self._timed(self.clock.ended(self))):
            member.end_counts = True
        for group in self.groups:
            if group.ended is None and not group.in_flight:
                group.ended = self.slice - 1
        return flying

    async def until(self, waited: Callable[[], Sequence[EpisodeInFlight]], poll_s: float | None = None) -> None:
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
        self.sums["waited"] += time.perf_counter() - began
        return found

    async def _play(self, group: InFlightGroup, i: int) -> None:
        """Play an episode to its end; one without a result ends in the ledger first."""
        member = group.members[i]
        asking = Asking(member, group.prompt, self.ledger.no_result(group.number, i, group.prompt), self.changed)
        playing = asyncio.ensure_future(self.play(group.prompt, group.admitted, i, asking))
        try:
            if asking.decided:
                await asking.until_decided(playing)
                member.trajectory = asking.decided.trajectory
                return
            trajectory = await playing
            asking.raise_if_other()
            if isinstance(trajectory.outcome, NoResult):
                episode, state = (group.number, i), trajectory_state(trajectory)
                self.ledger.write(no_result=episode, responses=len(member.responses), trajectory=state)
            member.trajectory = trajectory
        finally:
            playing.cancel()
            self.changed.set()


class Asking:
    """Answers the requests of an episode that is played: with the responses from before the run was continued, then
    with those of the slices. `decided`: its end, if that is known to be without a result."""

    def __init__(
        self, member: EpisodeInFlight, prompt: Prompt, decided: Decided | None, changed: asyncio.Event
    ) -> None:
        self.member, self.prompt, self.decided, self.changed = member, prompt, decided, changed
        self.number = 0  # of the next request
        self.gave_up = False  # whether the episode waits no longer for a request
        self.over = asyncio.Event()  # it has all responses before its decided end

    async def __call__(self, request: Request) -> Generation:
        """Return the response to a request."""
        member, mine = self.member, self.number
        if member.pending:
            raise UserError(
                "rollout.max_staleness: an episode made a request while the one before it was answered; with "
                "asynchronous rollouts it may have one at a time"
            )
        self.number += 1
        if self.decided and mine >= self.decided.responses:
            self.over.set()
            await asyncio.Event().wait()  # until it is cancelled
        if mine < len(member.responses):  # before the run was continued
            self._raise_if_other_context(request, member.responses[mine].context)
            return member.responses[mine]
        begun = member.started or Generation(request.context, *NOTHING, np.zeros(0, np.int32), False)
        member.started = None
        self._raise_if_other_context(request, begun.context)
        member.pending = Pending(request, asyncio.get_running_loop().create_future(), begun)
        self.changed.set()
        try:
            whole = await member.pending.response
        except asyncio.CancelledError:
            self.gave_up = True
            raise
        if self.decided and self.number >= self.decided.responses:
            self.over.set()
        return whole

    async def until_decided(self, playing: "asyncio.Future[Trajectory]") -> None:
        """Wait until the episode has the responses before its decided end. Raises what is no result of it."""
        assert self.decided is not None
        if self.decided.responses:
            ending = asyncio.ensure_future(self.over.wait())
            await asyncio.wait({playing, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if playing.done():
                playing.result()

    def raise_if_other(self) -> None:
        """Raise UserError if the episode, which has ended, gave up a request, or ends earlier than before the run was
        continued."""
        if self.gave_up:
            raise UserError(
                "rollout.max_staleness: an episode gave up a request that was being answered (a deadline around "
                "policy.generate?); with asynchronous rollouts it waits for its response"
            )
        if self.number < len(self.member.responses) or self.member.started:
            raise self._other_request()

    def _raise_if_other_context(self, request: Request, context: np.ndarray) -> None:
        """Raise UserError if an episode that is played again asks otherwise than before the run was continued."""
        if not np.array_equal(request.context, context):
            raise self._other_request()

    def _other_request(self) -> UserError:
        prompt = self.prompt
        return UserError(
            f"after the resume, an episode of prompt {prompt.index} of {prompt.source} sent another request to the "
            "policy than before: its environment is not deterministic (take all randomness from its seed; ptf try "
            "checks that), so with rollout.max_staleness the run cannot be continued"
        )
