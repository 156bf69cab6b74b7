"""From rewards to advantages, in numpy."""

import numpy as np


def group_relative(rewards: np.ndarray, scale_by_std: bool) -> np.ndarray:
    """[group] → [group]: reward minus the group's mean (GRPO, Shao et al. 2024, eq. 3), over the sample's standard deviation (n − 1) if asked for
    (Liu et al. 2025 show the bias of doing so). A group of equal rewards gets zeros."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + 1e-6) if scale_by_std else centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """[group] → [group]: reward minus the mean of the others' (RLOO, Ahmadian et al. 2024, eq. 8)."""
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def overlong(tokens: int, longest: int, margin: int) -> float:
    """What an answer of that many tokens loses: 0 up to `margin` before the longest there may be, then less by a straight line to −1 (DAPO, Yu et al.
    2025, eq. 13)."""
    return max(-1.0, min(0.0, (longest - margin - tokens) / margin)) if margin else 0.0


def generalised(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages of the tokens of one answer, [n], from their rewards and the values of the states before them, [n] each (GAE, Schulman et al. 2016,
    eq. 16). Nothing follows the last token."""
    found, later, value = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * value - values[t] + gamma * lam * later
        found[t], value = later, values[t]
    return found
