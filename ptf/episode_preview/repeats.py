"""Whether episodes that are played twice with the same seeds are the same."""

from collections.abc import Sequence

import numpy as np

from ptf.data.trajectory import NoResult, Reward, Trajectory


def differences(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> list[str]:
    """Return a line for each episode of which two plays differ: the first thing that is different.

    An episode that has no result in either play is not trained on, and is not compared.
    """
    found = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if isinstance(a.outcome, NoResult) and isinstance(b.outcome, NoResult):
            continue
        if (what := difference(a, b)) is not None:
            found.append(f"episode {number} ({a.prompt.source}, prompt {a.prompt.index}): {what}")
    return found


def difference(a: Trajectory, b: Trajectory) -> str | None:
    """Return the first difference between two plays of an episode, in words; None if they are the same."""
    for number, (one, other) in enumerate(zip(a.generations, b.generations, strict=False), 1):
        if not np.array_equal(one.context, other.context):
            return f"what the policy reads at call {number}"
        if not np.array_equal(one.sampled_ids, other.sampled_ids):
            return f"what the policy answers to the same text and seed, at call {number}"
    if len(a.generations) != len(b.generations):
        return f"the number of calls, {len(a.generations)} and {len(b.generations)}"
    if _outcome(a) != _outcome(b):
        return f"the reward, {_outcome(a)} and {_outcome(b)}"
    return None if a.text == b.text else "the text that is scored"


def _outcome(t: Trajectory) -> str:
    if isinstance(t.outcome, Reward):
        return f"{t.outcome.value!r}"
    return "none" if t.outcome is None else f"no result ({t.outcome.reason})"
