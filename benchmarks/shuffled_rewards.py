"""A control: GRPO that gives each episode the reward of another one of its step, so that there is nothing to learn."""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ptf.data.document import PackUnit
from ptf.data.trajectory import Group, Reward, Trajectory
from ptf.recipes.grpo.recipe import GRPO


class ShuffledRewards(GRPO):
    """GRPO after a permutation of the rewards of a step. The metric `reward` is that of the true ones."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return the sampled answers with the advantages of the permuted rewards."""
        rewards = [t.outcome for group in groups for t in group if isinstance(t.outcome, Reward)]
        answers = [g.sampled_ids.tobytes() for group in groups for t in group for g in t.generations]
        drawn = zlib.crc32(b"".join(answers))
        shuffled = iter(np.random.default_rng(drawn).permutation(len(rewards)))

        def given(t: Trajectory) -> Trajectory:
            return replace(t, outcome=rewards[next(shuffled)]) if isinstance(t.outcome, Reward) else t

        return super().compute_advantages([tuple(map(given, group)) for group in groups])
