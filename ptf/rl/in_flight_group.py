"""A group of episodes that are in flight, with the responses that each of them got and the one that it waits for.

A checkpoint has them as values (dicts, lists, numbers, texts and arrays). An episode is stored as the whole responses
to its requests, and the parts of those that are generated. When the run is continued, it is played again from its start
with these responses. One that has ended is stored as it is.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, Group, Prompt, Trajectory
from ptf.rl.engines.protocol import Request
from ptf.rl.trajectory_state import (
    generations_state,
    restored_generations,
    restored_trajectory,
    shared_length,
    trajectory_state,
    whole_context,
)


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

    def state(self) -> dict[str, Any]:
        """Return the episode as values."""
        if self.trajectory is not None:
            return {"ended": trajectory_state(self.trajectory), "due": self.due, "counts": self.end_counts}
        started, last = dict[str, Any](self.begun), self.responses[-1] if self.responses else None
        if started:
            started["shared"] = shared_length(started["context"], last)
            started["context"] = started["context"][started["shared"] :]
        return {"responses": generations_state(self.responses), "started": started, "due": self.due}

    @classmethod
    def restored(cls, state: Mapping[str, Any], prompt: Prompt) -> "Member":
        """Return the episode that `state` was called of."""
        if "ended" in state:
            return cls(
                trajectory=restored_trajectory(state["ended"], prompt), due=state["due"], end_counts=state["counts"]
            )
        responses, started = list(restored_generations(state["responses"])), dict(state["started"])
        if started:
            last = responses[-1] if responses else None
            started["context"] = whole_context(started["context"], started.pop("shared"), last)
        return cls(responses=responses, started=started, due=state["due"])


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

    def state(self) -> dict[str, Any]:
        """Return the group as values."""
        prompt = self.prompt
        return {
            "number": self.number,
            "admitted": self.admitted,
            "ended": self.ended,
            "prompt": {field.name: getattr(prompt, field.name) for field in fields(prompt)} | {"row": dict(prompt.row)},
            "members": [member.state() for member in self.members],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "InFlightGroup":
        """Return the group that `state` was called of."""
        prompt = Prompt(**state["prompt"])
        members = [Member.restored(member, prompt) for member in state["members"]]
        return cls(state["number"], prompt, state["admitted"], members, state["ended"])
