"""The rollouts in flight as values of a checkpoint: dicts, lists, numbers, texts and arrays.

An episode is stored as what it heard: the whole responses to its requests, and the parts of those that are generated.
It is played again from its start when the run is continued, and hears the same. One that has ended is stored as it is.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.rl.in_flight import FlyingGroup, InFlight, Member


def state_of(flight: InFlight) -> dict[str, Any]:
    """Return the state of the rollouts in flight, between two slices."""
    return {
        "slice": flight.slice,
        "admissions": flight.admissions,
        "next_step": flight.next_step,
        "groups": [_group(group) for group in flight.groups],
    }


def restore(flight: InFlight, state: Mapping[str, Any]) -> None:
    """Continue from a state."""
    flight.slice, flight.admissions, flight.next_step = state["slice"], state["admissions"], state["next_step"]
    flight.groups = [_restored_group(group) for group in state["groups"]]


def _group(group: FlyingGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "number": group.number,
        "admitted": group.admitted,
        "ended": group.ended,
        "prompt": {
            "tokens": prompt.tokens,
            "row": dict(prompt.row),
            "source": prompt.source,
            "index": prompt.index,
            "weight": prompt.weight,
        },
        "members": [_member(member) for member in group.members],
    }


def _restored_group(state: Mapping[str, Any]) -> FlyingGroup:
    prompt = Prompt(**state["prompt"])
    members = [_restored_member(member, prompt) for member in state["members"]]
    return FlyingGroup(state["number"], prompt, state["admitted"], members, state["ended"])


def _member(member: Member) -> dict[str, Any]:
    if member.trajectory is not None:
        return {"ended": _trajectory(member.trajectory), "due": member.due}
    started = member.started
    if one := member.pending:
        started = {"context": one.request.context, "ids": one.ids, "logprobs": one.logprobs, "versions": one.versions}
    return {"heard": [_generation(generation) for generation in member.heard], "started": started, "due": member.due}


def _restored_member(state: Mapping[str, Any], prompt: Prompt) -> Member:
    if "ended" in state:
        return Member(trajectory=_restored_trajectory(state["ended"], prompt), due=state["due"])
    heard = [Generation(**generation) for generation in state["heard"]]
    return Member(heard=heard, started=dict(state["started"]), due=state["due"])


def _generation(generation: Generation) -> dict[str, Any]:
    return {
        "context": generation.context,
        "sampled_ids": generation.sampled_ids,
        "logprobs": generation.logprobs,
        "versions": generation.versions,
        "finished": generation.finished,
    }


def _trajectory(t: Trajectory) -> dict[str, Any]:
    outcome: tuple[str, Any] | None = None
    if isinstance(t.outcome, Reward):
        outcome = ("reward", t.outcome.value)
    elif isinstance(t.outcome, NoResult):
        outcome = ("no_result", t.outcome.reason)
    return {
        "generations": [_generation(generation) for generation in t.generations],
        "text": t.text,
        "outcome": outcome,
        "token_columns": dict(t.token_columns),
        "complete": t.complete,
        "counts": dict(t.counts),
        "turn_rewards": t.turn_rewards,
    }


def _restored_trajectory(state: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    outcome = state["outcome"]
    return Trajectory(
        prompt,
        tuple(Generation(**generation) for generation in state["generations"]),
        state["text"],
        outcome and (Reward(outcome[1]) if outcome[0] == "reward" else NoResult(outcome[1])),
        state["token_columns"],
        state["complete"],
        state["counts"],
        None if state["turn_rewards"] is None else np.asarray(state["turn_rewards"], np.float64),
    )
