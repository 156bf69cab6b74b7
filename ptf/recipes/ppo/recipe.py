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
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.trajectory import Group, Reward, Trajectory, samples_of
from ptf.model.model import Model
from ptf.recipes.policy import RewardedPolicy
from ptf.recipes.ppo.config import PPOConfig
from ptf.recipes.protocol import CriticRecipe, Metrics
from ptf.recipes.turns import rewards_of_turns, turn_ends


class Critic(CriticRecipe):
    """The recipe of PPO's critic: regress the value of each state to the return. The loss is a mean over tokens."""

    config: PPOConfig

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the clipped squared error of the values, summed over tokens."""
        values = batch.through(model, lambda x, head: head.values(x))  # [B, T]
        old, returns = batch.token_columns["values"], batch.token_columns["returns"]
        clipped = old + (values - old).clamp(-self.config.value_clip, self.config.value_clip)
        clipped_error, error = (clipped - returns) ** 2, (values - returns) ** 2
        loss = (torch.maximum(clipped_error, error) * batch.loss_weights).sum() / 2
        metrics = {
            "value": (values * batch.loss_weights).sum(),
            "clip_share": ((clipped_error > error) * batch.loss_weights).sum(),
            "value_mse": (error * batch.loss_weights).sum(),
        }
        return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}


class PPO(RewardedPolicy):
    """The policy's recipe: the clipped objective with advantages from a critic."""

    config: PPOConfig

    @property
    def critic(self) -> Critic:
        """The recipe of the critic."""
        keys = self.config
        return Critic(keys, self.context, keys.critic_lr, keys.critic_warmup, keys.bootstrap_truncated)

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return the responses that have a result, with generalised advantages, which are centred and scaled over all
        tokens of the step, and returns.

        With `overlong_filter`, those that were truncated at a limit are left out.
        """
        scored = [t for group in groups for t in group if isinstance(t.outcome, Reward) and self.is_trained(t)]
        advantages = [
            generalised_advantages(
                self.rewards(t), t.token_columns["values"], self.config.gamma, self.config.lam, t.value_after or 0.0
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
        if weight := self.kl_weight("reward"):
            rewards -= weight * self.kl_of_tokens(trajectory).numpy()
        if self.config.credit_level == "turn":
            rewards[turn_ends(trajectory)] += rewards_of_turns(trajectory)
            rewards[-1:] -= self.overlong_penalty(trajectory)
        else:
            rewards[-1] += trajectory.outcome.value - self.overlong_penalty(trajectory)
        return rewards


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
