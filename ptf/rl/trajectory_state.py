"""Trajectories as values of a checkpoint (dicts, lists, numbers, texts and arrays), and these as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory


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
