"""Proximal policy optimisation (Schulman et al. 2017) of a policy, with a critic that values every token.

δₜ = rₜ + γ V(sₜ₊₁) − V(sₜ),   Âₜ = Σₗ (γ λ)ˡ δₜ₊ₗ
        (Schulman et al. 2016, eq. 16), over the tokens of an answer; V is 0 after the last
rₜ      the reward at the last token; with `kl_in: reward`, − kl_coef · K at every token
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
from ptf.recipes.advantages import generalised_advantages, overlong_penalty
from ptf.recipes.grpo.recipe import GRPO, estimate_kl
from ptf.recipes.ppo.config import PPOConfig
from ptf.recipes.protocol import FrozenModelSpec, Metrics


@dataclass(frozen=True)
class Critic:
    """The recipe of the critic: regress the value of each state to the return. The loss is a mean over tokens."""

    value_clip: float = 0.2
    lr: float | None = None
    warmup: int = 0
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
        values = model(batch.tokens, batch.positions, batch.segments, values_of)  # [B, T]
        old, returns = batch.token_columns["values"], batch.token_columns["returns"]
        clipped = old + (values - old).clamp(-self.value_clip, self.value_clip)
        clipped_error, error = (clipped - returns) ** 2, (values - returns) ** 2
        loss = (torch.maximum(clipped_error, error) * batch.loss_weights).sum() / 2
        metrics = {
            "value": (values * batch.loss_weights).sum(),
            "clip_share": ((clipped_error > error) * batch.loss_weights).sum(),
            "error": (error * batch.loss_weights).sum(),
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
    whiten: bool = True
    value_clip: float = 0.2
    critic_lr: float | None = None
    critic_warmup: int = 0

    @property
    def critic(self) -> Critic:
        """The recipe of the critic."""
        return Critic(self.value_clip, self.critic_lr, self.critic_warmup)

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return the answers that have a result, with generalised advantages and returns."""
        scored = [t for group in groups for t in group if isinstance(t.outcome, Reward)]
        advantages = [
            generalised_advantages(self.rewards(t), t.token_columns["values"], self.gamma, self.lam) for t in scored
        ]
        if not advantages:
            return []
        of_step = np.concatenate(advantages)
        mean, std = (of_step.mean(), of_step.std() + 1e-8) if self.whiten else (0.0, 1.0)
        return [
            (sample,)
            for t, a in zip(scored, advantages, strict=True)
            for sample in samples_of(
                replace(t, token_columns={**t.token_columns, "returns": a + t.token_columns["values"]}),
                (a - mean) / std,
            )
        ]

    def rewards(self, trajectory: Trajectory) -> np.ndarray:
        """Return the reward of each token of an answer: [n]."""
        assert isinstance(trajectory.outcome, Reward)
        rewards = np.zeros(trajectory.num_sampled_tokens)
        if self.kl_coef and self.kl_in == "reward":
            old, reference = (
                torch.from_numpy(trajectory.token_columns[name]) for name in ("old_logprobs", "reference_logprobs")
            )
            rewards -= self.kl_coef * estimate_kl(self.kl_estimator, old, reference).numpy()
        rewards[-1] += trajectory.outcome.value + overlong_penalty(
            trajectory.num_sampled_tokens, self.max_new_tokens, self.overlong_buffer_tokens
        )
        return rewards
