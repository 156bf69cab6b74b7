"""A group of episodes that are in flight, with the responses that each of them got and the one that it waits for."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from ptf.data.trajectory import Generation, Group, Prompt, Trajectory
from ptf.rl.engines.protocol import Request


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

    responses: list[Generation] = field(default_factory=list)  # the whole responses so far
    started: dict[str, np.ndarray] = field(default_factory=dict)  # restored: the context and parts of the next response
    pending: Pending | None = None
    due: int = 0  # the first slice in which its next request, or its end, counts; earlier ones wait for it
    trajectory: Trajectory | None = None
    end_counts: bool = False  # whether its end counts: it may be earlier than the clock allows for
    task: "asyncio.Task[None] | None" = None

    @property
    def begun(self) -> dict[str, np.ndarray]:
        """Return the context and the parts of the response that is generated; empty if none is."""
        one = self.pending
        if one is None:
            return self.started
        return {"context": one.request.context, "ids": one.ids, "logprobs": one.logprobs, "versions": one.versions}

    @property
    def awaits_environment(self) -> bool:
        """Return whether the episode has neither ended nor asked the policy."""
        return self.trajectory is None and self.pending is None


@dataclass(eq=False)
class InFlightGroup:
    """A prompt that was admitted, and the episodes of its group."""

    number: int  # of the admission
    prompt: Prompt
    admitted: int  # version of the weights at the admission: that of its oldest token; it keys the seeds
    members: list[Member]
    ended: int | None = None  # the slice in which its last episode ended

    @property
    def in_flight(self) -> list[tuple[int, Member]]:
        """Return the episodes whose end does not count yet, with their numbers."""
        return [(i, member) for i, member in enumerate(self.members) if not member.end_counts]

    @property
    def trajectories(self) -> Group:
        """Return its episodes, all of which have ended."""
        return tuple(member.trajectory for member in self.members if member.trajectory is not None)
