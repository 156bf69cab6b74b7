"""TRL's asynchronous objective as a recipe of ptf, to tell what it changes from what the system around it changes.

Its π_old is the engine's, of the version that sampled the token: the ratio is clipped around that, and there is no
further weight. The standard deviation of a group is that of the population.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.trajectory import Trajectory
from ptf.model.decoder import Decoder
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.protocol import Metrics


class ClippedToEngine(GRPO):
    """GRPO with the log-probs of the engine in place of those of the trainer before the update."""

    def advantages(self, group: Sequence[Trajectory]) -> Sequence[float | np.ndarray]:
        """See GRPO."""
        rewards = np.array([self.reward(trajectory) for trajectory in group])
        return list((rewards - rewards.mean()) / (rewards.std() + 1e-8))

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        """See GRPO. With these log-probs, the importance weight of every token is 1."""
        columns = {**batch.token_columns, "old_logprobs": batch.token_columns["rollout_logprobs"]}
        return super().loss(model, replace(batch, token_columns=columns), frozen_models)
