"""The rollouts in flight as values of a checkpoint: dicts, lists, numbers, texts and arrays.

An episode is stored as what it heard: the whole responses to its requests, and the parts of those that are generated.
It is played again from its start when the run is continued, and hears the same. One that has ended is stored as it is.
"""

from collections.abc import Mapping
from typing import Any

from ptf.data.trajectory import Generation, Prompt
from ptf.rl.flying_group import FlyingGroup, Member
from ptf.rl.in_flight import InFlight
from ptf.rl.trajectory_state import generation_state, restored_trajectory, trajectory_state


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
        return {"ended": trajectory_state(member.trajectory), "due": member.due, "counts": member.counts}
    heard = [generation_state(generation) for generation in member.heard]
    return {"heard": heard, "started": member.begun, "due": member.due}


def _restored_member(state: Mapping[str, Any], prompt: Prompt) -> Member:
    if "ended" in state:
        return Member(trajectory=restored_trajectory(state["ended"], prompt), due=state["due"], counts=state["counts"])
    heard = [Generation(**generation) for generation in state["heard"]]
    return Member(heard=heard, started=dict(state["started"]), due=state["due"])
