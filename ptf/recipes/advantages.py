"""From rewards to advantages, in numpy."""

import numpy as np


def group_relative(rewards: np.ndarray, scale_by_std: bool) -> np.ndarray:
    """[group] → [group]: reward minus the group's mean (GRPO, Shao et al. 2024, eq. 3), over its standard deviation if asked for
    (Liu et al. 2025 show the bias of doing so). A group of equal rewards gets zeros."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + 1e-6) if scale_by_std else centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """[group] → [group]: reward minus the mean of the others' (RLOO, Ahmadian et al. 2024, eq. 8)."""
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def overlong(tokens: int, longest: int, margin: int) -> float:
    """What an answer of that many tokens loses: 0 up to `margin` before the longest there may be, then less by a straight line to −1 (DAPO, Yu et al.
    2025, eq. 13)."""
    return min(0.0, (longest - margin - tokens) / margin) if margin else 0.0
