"""Trajectories as values of a checkpoint (dicts, lists, numbers, texts and arrays), and as JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory


def generation_state(generation: Generation) -> dict[str, Any]:
    """Return a generation as values."""
    return {
        "context": generation.context,
        "sampled_ids": generation.sampled_ids,
        "logprobs": generation.logprobs,
        "versions": generation.versions,
        "finished": generation.finished,
    }


def trajectory_state(t: Trajectory) -> dict[str, Any]:
    """Return a trajectory as values, without its prompt."""
    outcome: tuple[str, Any] | None = None
    if isinstance(t.outcome, Reward):
        outcome = ("reward", t.outcome.value)
    elif isinstance(t.outcome, NoResult):
        outcome = ("no_result", t.outcome.reason)
    return {
        "generations": [generation_state(generation) for generation in t.generations],
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
        tuple(Generation(**generation) for generation in state["generations"]),
        state["text"],
        outcome and (Reward(outcome[1]) if outcome[0] == "reward" else NoResult(outcome[1])),
        state["token_columns"],
        state["complete"],
        state["counts"],
        None if state["turn_rewards"] is None else np.asarray(state["turn_rewards"], np.float64),
    )


def trajectory_to_json(trajectory: Trajectory) -> Any:
    """Return a trajectory, without its prompt, as values that JSON can hold."""
    return _to_json(trajectory_state(trajectory))


def trajectory_from_json(value: Any, prompt: Prompt) -> Trajectory:
    """Return the trajectory that `trajectory_to_json` was given, of this prompt."""
    return restored_trajectory(_from_json(value), prompt)


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _to_json(one) for key, one in value.items()}
    return [_to_json(one) for one in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "values"}:
            return np.asarray(value["values"], value["dtype"])
        return {key: _from_json(one) for key, one in value.items()}
    return [_from_json(one) for one in value] if isinstance(value, list) else value
