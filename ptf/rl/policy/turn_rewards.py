"""The rewards of an episode's turns, as its rollout function gives them to `Policy.trajectory`."""

from collections.abc import Sequence

import numpy as np

from ptf.data.trajectory import NoResult, Reward, is_reward
from ptf.errors import UserError

TOLERANCE = 1e-6  # of the difference between an outcome and the sum of its turns, relative to the rewards' sizes


def with_turns(
    outcome: Reward | NoResult | None, given: Sequence[float] | np.ndarray, turns: int
) -> tuple[Reward | NoResult, np.ndarray | None]:
    """Return an episode's outcome and the rewards of its `turns` turns, [turns] float64 or None without a result.

    Without an outcome it is the sum of the rewards. Raises UserError if the number of rewards is not that of the turns,
    or if they do not add up to the outcome.
    """
    if isinstance(outcome, NoResult):
        return outcome, None
    rewards = np.asarray(given, np.float64)
    if rewards.shape != (turns,):
        raise UserError(
            f"turn_rewards has the shape {rewards.shape}, but {turns} calls of the episode are trained: give one "
            "reward for each of them, in order"
        )
    if not all(map(is_reward, rewards)):
        return NoResult(f"the rewards of the turns are {rewards.tolist()}"), None
    total = float(rewards.sum())
    if outcome is None:
        return Reward(total), rewards
    if abs(outcome.value - total) > TOLERANCE * max(1.0, float(np.abs(rewards).sum())):
        raise UserError(
            f"the reward of the episode is {outcome.value:g}, but turn_rewards add up to {total:g}: add the rest to "
            "the turn that earned it, or leave the reward out"
        )
    return outcome, rewards
