"""Computation of advantages from rewards, in numpy."""

import numpy as np


def group_relative(rewards: np.ndarray, scale_by_std: bool) -> np.ndarray:
    """Subtract the group's mean from each reward: [group] → [group] (GRPO, Shao et al. 2024, section 4.1.2).

    With `scale_by_std` the result is divided by the sample standard deviation (n − 1); Liu et al. 2025 show the bias of
    doing so. A group of equal rewards gets zeros.
    """
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + 1e-6) if scale_by_std else centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Subtract the mean of the others' rewards from each reward: [group] → [group] (RLOO, Ahmadian et al. 2024, eq.
    8)."""
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float, value_after: float = 0.0
) -> np.ndarray:
    """Return the advantages of one episode's tokens, [n], from their rewards and the values of the states before them,
    [n] each.

    GAE, Schulman et al. 2016, eq. 16. `value_after` is the value of the state after the last token: 0 where the episode
    ended by itself.
    """
    advantages = np.zeros(len(rewards))
    next_advantage, next_value = 0.0, value_after
    for t in reversed(range(len(rewards))):
        next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
        advantages[t], next_value = next_advantage, values[t]
    return advantages
