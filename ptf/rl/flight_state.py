"""The rollouts in flight as values of a checkpoint: dicts, lists, numbers, texts and arrays.

An episode is stored as the whole responses to its requests, and the parts of those that are generated. When the run is
continued, it is played again from its start with these responses. One that has ended is stored as it is.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ptf.data.trajectory import Prompt
from ptf.rl.in_flight import InFlight
from ptf.rl.in_flight_group import InFlightGroup, Member
from ptf.rl.trajectory_state import (
    generations_state,
    restored_generations,
    restored_trajectory,
    shared_length,
    trajectory_state,
    whole_context,
)


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


def _group(group: InFlightGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "number": group.number,
        "admitted": group.admitted,
        "ended": group.ended,
        "prompt": {field.name: getattr(prompt, field.name) for field in fields(prompt)} | {"row": dict(prompt.row)},
        "members": [_member(member) for member in group.members],
    }


def _restored_group(state: Mapping[str, Any]) -> InFlightGroup:
    prompt = Prompt(**state["prompt"])
    members = [_restored_member(member, prompt) for member in state["members"]]
    return InFlightGroup(state["number"], prompt, state["admitted"], members, state["ended"])


def _member(member: Member) -> dict[str, Any]:
    if member.trajectory is not None:
        return {"ended": trajectory_state(member.trajectory), "due": member.due, "counts": member.end_counts}
    started, last = dict[str, Any](member.begun), member.responses[-1] if member.responses else None
    if started:
        started["shared"] = shared_length(started["context"], last)
        started["context"] = started["context"][started["shared"] :]
    return {"responses": generations_state(member.responses), "started": started, "due": member.due}


def _restored_member(state: Mapping[str, Any], prompt: Prompt) -> Member:
    if "ended" in state:
        return Member(
            trajectory=restored_trajectory(state["ended"], prompt), due=state["due"], end_counts=state["counts"]
        )
    responses, started = list(restored_generations(state["responses"])), dict(state["started"])
    if started:
        last = responses[-1] if responses else None
        started["context"] = whole_context(started["context"], started.pop("shared"), last)
    return Member(responses=responses, started=started, due=state["due"])
