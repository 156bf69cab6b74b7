"""A group of episodes that are in flight, with the responses that each of them got and the one that it waits for.

A checkpoint has them as values (dicts, lists, numbers, texts and arrays). An episode is stored as the whole responses
to its requests, and the parts of those that are generated. When the run is continued, it is played again from its start
with these responses. One that has ended is stored as it is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, Group, NoResult, Prompt, Reward, Trajectory
from ptf.rl.engines.protocol import Request


@dataclass(eq=False)
class Pending:
    """A request of an episode that waits for its response, and what was sampled of it in earlier slices."""

    request: Request
    response: "asyncio.Future[Generation]"
    begun: Generation

    def part(self, slice_tokens: int) -> Request:
        """Return the request for the next slice."""
        sampling, ids = self.request.sampling, self.begun.sampled_ids
        return replace(
            self.request,
            context=np.concatenate([self.request.context, ids]),
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens - len(ids), slice_tokens)),
            offset=self.request.offset + len(ids),
        )

    def add(self, part: Generation) -> Generation | None:
        """Add what a slice sampled; return the whole response if it has ended."""
        before = self.begun
        self.begun = Generation(
            before.context,
            np.concatenate([before.sampled_ids, part.sampled_ids]),
            np.concatenate([before.logprobs, part.logprobs]),
            np.concatenate([before.versions, part.versions]),
            part.finished,
        )
        has_ended = part.finished or len(self.begun.sampled_ids) >= self.request.sampling.max_new_tokens
        return self.begun if has_ended else None


@dataclass(eq=False)
class EpisodeInFlight:
    """One episode of a group."""

    responses: list[Generation] = field(default_factory=list)  # the whole responses so far
    started: Generation | None = None  # restored: what was sampled of the next response
    pending: Pending | None = None
    due: int = 0  # the first slice in which its next request, or its end, counts; earlier ones wait for it
    trajectory: Trajectory | None = None
    end_counts: bool = False  # whether its end counts: it may be earlier than the clock allows for
    task: "asyncio.Task[None] | None" = None

    @property
    def begun(self) -> Generation | None:
        """Return what was sampled of the response that is generated; None if none is."""
        return self.pending.begun if self.pending else self.started

    @property
    def awaits_environment(self) -> bool:
        """Return whether the episode has neither ended nor asked the policy."""
        return self.trajectory is None and self.pending is None

    def state(self) -> dict[str, Any]:
        """Return the episode as values."""
        if self.trajectory is not None:
            return {"ended": trajectory_state(self.trajectory), "due": self.due, "counts": self.end_counts}
        started, one = dict[str, Any](), self.begun
        if one is not None:
            shared = shared_length(one.context, self.responses[-1] if self.responses else None)
            started = {"shared": shared, "context": one.context[shared:], "ids": one.sampled_ids}
            started |= {"logprobs": one.logprobs, "versions": one.versions}
        return {"responses": generations_state(self.responses), "started": started, "due": self.due}

    @classmethod
    def restored(cls, state: Mapping[str, Any], prompt: Prompt) -> "EpisodeInFlight":
        """Return the episode that `state` was called of."""
        if "ended" in state:
            return cls(
                trajectory=restored_trajectory(state["ended"], prompt), due=state["due"], end_counts=state["counts"]
            )
        responses, started = list(restored_generations(state["responses"])), None
        if parts := state["started"]:
            context = whole_context(parts["context"], parts["shared"], responses[-1] if responses else None)
            started = Generation(context, parts["ids"], parts["logprobs"], parts["versions"], False)
        return cls(responses=responses, started=started, due=state["due"])


@dataclass(eq=False)
class InFlightGroup:
    """A prompt that was admitted, and the episodes of its group."""

    number: int  # of the admission
    prompt: Prompt
    admitted: int  # version of the weights at the admission: that of its oldest token; it keys the seeds
    members: list[EpisodeInFlight]
    ended: int | None = None  # the slice in which its last episode ended

    @property
    def in_flight(self) -> list[tuple[int, EpisodeInFlight]]:
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
        members = [EpisodeInFlight.restored(member, prompt) for member in state["members"]]
        return cls(state["number"], prompt, state["admitted"], members, state["ended"])


def shared_length(context: np.ndarray, before: Generation | None) -> int:
    """Return how many ids a context [c] shares with the start of what the generation before it has: its context, and
    what was sampled."""
    if before is None:
        return 0
    earlier = np.concatenate([before.context, before.sampled_ids])[: len(context)]
    different = np.flatnonzero(earlier != context[: len(earlier)])
    return int(different[0]) if len(different) else len(earlier)


def whole_context(rest: np.ndarray, shared: int, before: Generation | None) -> np.ndarray:
    """Return a context of which `shared` ids are those that the generation before it begins with, and then `rest`."""
    if before is None:
        return rest
    return np.concatenate([np.concatenate([before.context, before.sampled_ids])[:shared], rest])


def generations_state(generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """Return the generations of an episode as values.

    A context is stored from where it leaves the generation before it: with all contexts whole, an episode of many turns
    would take bytes that grow with their square.
    """
    states = list[dict[str, Any]]()
    for before, one in zip([None, *generations], generations, strict=False):
        shared = shared_length(one.context, before)
        values = {field.name: getattr(one, field.name) for field in fields(one)}
        states.append({"shared": shared, **values, "context": one.context[shared:]})
    return states


def restored_generations(states: Sequence[Mapping[str, Any]]) -> tuple[Generation, ...]:
    """Return the generations that `generations_state` was given."""
    restored = list[Generation]()
    for state in states:
        values, before = dict(state), restored[-1] if restored else None
        context = whole_context(values.pop("context"), values.pop("shared"), before)
        restored.append(Generation(context=context, **values))
    return tuple(restored)


def trajectory_state(t: Trajectory) -> dict[str, Any]:
    """Return a trajectory as values, without its prompt."""
    outcome: tuple[str, Any] | None = None
    if isinstance(t.outcome, Reward):
        outcome = ("reward", t.outcome.value)
    elif isinstance(t.outcome, NoResult):
        outcome = ("no_result", t.outcome.reason)
    return {
        "generations": generations_state(t.generations),
        "text": t.text,
        "outcome": outcome,
        "token_columns": dict(t.token_columns),
        "complete": t.complete,
        "counts": dict(t.counts),
        "turn_rewards": t.turn_rewards,
    }


def restored_trajectory(state: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    """Return the trajectory that `trajectory_state` was given, of this prompt."""
    outcome = state["outcome"]
    return Trajectory(
        prompt,
        restored_generations(state["generations"]),
        state["text"],
        outcome and (Reward(outcome[1]) if outcome[0] == "reward" else NoResult(outcome[1])),
        state["token_columns"],
        state["complete"],
        state["counts"],
        None if state["turn_rewards"] is None else np.asarray(state["turn_rewards"], np.float64),
    )


def array_to_json(value: Any) -> Any:
    """Return an array, or a number of numpy, as a value that JSON can hold: `default` of json.dumps."""
    return {"dtype": str(value.dtype), "values": value.tolist()} if isinstance(value, np.ndarray) else value.item()


def array_from_json(value: dict[str, Any]) -> Any:
    """Return the array that `array_to_json` was given, and any other object as it is: `object_hook` of json.loads."""
    return np.asarray(value["values"], value["dtype"]) if value.keys() == {"dtype", "values"} else value
