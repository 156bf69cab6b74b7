"""From rewards to advantages, in numpy."""

import numpy as np


def group_relative(rewards: np.ndarray, scale_by_std: bool) -> np.ndarray:
    """[group] → [group]: reward minus the group's mean (GRPO, Shao et al. 2024, eq. 3), over its standard deviation if asked for
    (Liu et al. 2025 show the bias of doing so). A group of equal rewards gets zeros."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + 1e-6) if scale_by_std else centred
