"""Proximal policy optimisation (Schulman et al. 2017) of a policy, with a critic that values every token.

δₜ = rₜ + γ V(sₜ₊₁) − V(sₜ),   Âₜ = Σₗ (γ λ)ˡ δₜ₊ₗ
        (Schulman et al. 2016, eq. 16), over the sampled tokens of an episode; V is 0 after the last, or with
        `bootstrap_truncated` the critic's value if the episode was truncated at a limit (Pardo et al. 2018)
rₜ      the reward at the last token, with `credit_level: turn` the reward of each turn at the turn's last token;
        with `kl_in: reward`, − kl_coef · K at every token
policy  the objective of grpo/recipe.py with these advantages, by default centred and scaled over all tokens of a step
critic  ½ max((V − R)², (clip(V, V_old ± value_clip) − R)²),  R = Â + V_old, before centring
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.sample import PackUnit
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory, samples_of
from ptf.model.decoder import Decoder
from ptf.model.scalar import Scalar
from ptf.recipes.advantages import generalised_advantages
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.ppo.config import PPOConfig
from ptf.recipes.protocol import FrozenModelSpec, Metrics
from ptf.recipes.turns import rewards_of_turns, turn_ends


@dataclass(frozen=True)
class CriticRecipe:
    """The recipe of the critic: regress the value of each state to the return. The loss is a mean over tokens."""

    value_clip: float = 0.2
    lr: float | None = None
    warmup: int = 0
    bootstrap_truncated: bool = False
    online: ClassVar[bool] = PPOConfig.online
    head: ClassVar[Literal["lm", "scalar"]] = "scalar"

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """A critic has no frozen models."""
        return {}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Raise NotImplementedError: a critic trains on rollouts."""
        raise NotImplementedError("a critic trains on what the policy sampled")

    def denominator(self, batch: Batch) -> Tensor:
        """Count the trained tokens, by their weights."""
        return batch.loss_weights.sum(dtype=torch.float64)

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        """Return the clipped squared error of the values, summed over tokens."""
        values = model(batch.tokens, batch.positions, batch.segments, values_of, varlen=batch.varlen)  # [B, T]
        old, returns = batch.token_columns["values"], batch.token_columns["returns"]
        clipped = old + (values - old).clamp(-self.value_clip, self.value_clip)
        clipped_error, error = (clipped - returns) ** 2, (values - returns) ** 2
        loss = (torch.maximum(clipped_error, error) * batch.loss_weights).sum() / 2
        metrics = {
            "value": (values * batch.loss_weights).sum(),
            "clip_share": ((clipped_error > error) * batch.loss_weights).sum(),
            "value_mse": (error * batch.loss_weights).sum(),
        }
        return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}


def values_of(x: Tensor, head: Scalar) -> Tensor:
    """Apply a scalar head to hidden states."""
    return head.values(x)


@dataclass(frozen=True)
class PPO(GRPO):
    """The policy's recipe: GRPO's loss with advantages from a critic."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float = 0.2
    critic_lr: float | None = None
    critic_warmup: int = 0
    bootstrap_truncated: bool = False

    @property
    def critic(self) -> CriticRecipe:
        """The recipe of the critic."""
        return CriticRecipe(self.value_clip, self.critic_lr, self.critic_warmup, self.bootstrap_truncated)

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return the responses that have a result, with generalised advantages, which are centred and scaled over all
        tokens of the step, and returns.

        With `overlong_filter`, those that were truncated at a limit are left out.
        """
        scored = [t for group in groups for t in group if isinstance(t.outcome, Reward) and self.is_trained(t)]
        advantages = [
            generalised_advantages(
                self.rewards(t), t.token_columns["values"], self.gamma, self.lam, t.value_after or 0.0
            )
            for t in scored
        ]
        if not advantages:
            return []
        of_step = np.concatenate(advantages)
        mean, std = of_step.mean(), of_step.std() + 1e-8
        return [
            (sample,)
            for t, a in zip(scored, advantages, strict=True)
            for sample in samples_of(
                replace(t, token_columns={**t.token_columns, "returns": a + t.token_columns["values"]}),
                (a - mean) / std,
            )
        ]

    def rewards(self, trajectory: Trajectory) -> np.ndarray:
        """Return the reward of each token of a response: [n]."""
        assert isinstance(trajectory.outcome, Reward)
        rewards = np.zeros(trajectory.num_sampled_tokens)
        if self.kl_coef and self.kl_in == "reward":
            rewards -= self.kl_coef * self.kl_of_tokens(trajectory).numpy()
        if self.credit_level == "turn":
            rewards[turn_ends(trajectory)] += rewards_of_turns(trajectory)
            rewards[-1:] -= self.overlong_penalty(trajectory)
        else:
            rewards[-1] += trajectory.outcome.value - self.overlong_penalty(trajectory)
        return rewards
