"""Group-relative policy optimisation (Shao et al., DeepSeekMath, 2024) and its family: PPO's clipped objective
without a critic.

    Â  = (r − b) / std(r of the group)
         for every token of a response; b: the mean reward of the group, or of the others in it (leave-one-out: RLOO,
         Ahmadian et al. 2024, eq. 8, which has no std)
    J  = mean of  w · min(ρ Â, clip(ρ, 1 − clip_low, 1 + clip_high) Â) − kl_coef · K,     ρ = π / π_old
    ρ  of a token; or of a sample, the geometric mean over its tokens (GSPO, Zheng et al. 2025, eq. 7 and 14)
    + c_H H(π)  with `entropy_coef`, of each token's distribution
    w  = min(π_old / π_engine, `tis_cap`): the engine's distribution differs slightly from the trainer's π_old
         (truncated importance sampling, Yao et al. 2025); `tis_level: sequence` takes the product over a
         sample, and `tis_mode: mask` gives weights above the cap or below its inverse a w of 0
    With `dual_clip` c, J of a token with Â < 0 is at least c Â (Ye et al. 2020, eq. 5). With `policy_loss: cispo` it is
    w · sg(clip(ρ, 1 − clip_low, 1 + clip_high)) Â log π, where sg is a constant (MiniMax-M1, 2025, eq. 4 and 5).
    K  estimates KL(π ‖ π_ref): log π/π_ref (k1), (log π/π_ref)² / 2 (k2), π_ref/π − log π_ref/π − 1 (k3)
         (Schulman 2020); added to the loss, or subtracted from the reward

The mean is over all tokens of the optimizer step (DAPO, Yu et al. 2025, eq. 8), over episodes of the means over their
tokens (`episode_mean`; GRPO, eq. 3), or over episodes of the sums over their tokens divided by the largest length
(Dr.GRPO, Liu et al. 2025, section 3.2). An episode is one response, or all its turns, also where it was split into
several samples. With `importance_sampling_level: sequence`, ρ is that of one sample: turns of an episode of which each
continues the context of the one before.

With `credit_level: turn` the advantage of a token is that of its turn (ptf/recipes/turns.py). If b leaves the episode
itself out and nothing is divided by a standard deviation, the gradient is that of the expected reward, up to what the
mean divides by: `constant_length` divides by the number of episodes, which does not depend on the responses, and the
others by numbers of tokens, which do (Dr.GRPO, section 3.1). With the mean over a whole group of n, the gradient is
(n − 1)/n times as large. Dividing by the group's own deviation changes its direction: groups whose rewards differ
little count more.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.trajectory import Group, Reward, Trajectory, samples_of
from ptf.recipes.documents import document_weights, episode_shares, sums
from ptf.recipes.grpo.config import GRPOConfig
from ptf.recipes.policy import RewardedPolicy, broadcast_to_tokens
from ptf.recipes.turns import leave_one_out_by_turn, rewards_of_turns, rewards_to_go, turn_ends


class GRPO(RewardedPolicy):
    """The clipped objective with advantages relative to a group; see the module's docstring."""

    config: GRPOConfig

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return the sampled responses with their advantages.

        Responses without a result enter no baseline and are not trained on; a group with fewer than two results is left
        out. With `overlong_filter`, episodes that were truncated at a limit enter the baseline and are not trained on.
        """
        units: list[PackUnit] = []
        for group in groups:
            scored = [t for t in group if isinstance(t.outcome, Reward)]
            if len(scored) < 2:
                continue
            units += [
                (sample,)
                for t, a in zip(scored, self.advantages(scored), strict=True)
                if self.is_trained(t)
                for sample in samples_of(t, a)
            ]
        return units

    def advantages(self, group: Sequence[Trajectory]) -> Sequence[float | np.ndarray]:
        """Return the advantage of each episode of a group, or of each of its sampled tokens, [n]."""
        if self.config.credit_level == "turn":
            returns = [rewards_to_go(self.turn_rewards(t), self.config.turn_discount) for t in group]
            return [np.repeat(a, t.turn_lengths) for t, a in zip(group, leave_one_out_by_turn(returns), strict=True)]
        rewards = np.array([self.reward(t) for t in group])
        if self.config.baseline == "leave_one_out":
            return list(leave_one_out(rewards))
        return list(group_relative(rewards, self.config.scale_by_std))

    def reward(self, trajectory: Trajectory) -> float:
        """Return the reward, less the penalties for the response's length and its distance from the reference."""
        assert isinstance(trajectory.outcome, Reward)
        value = trajectory.outcome.value - self.overlong_penalty(trajectory)
        if weight := self.kl_weight("reward"):
            value -= weight * float(self.kl_of_tokens(trajectory).sum())
        return value

    def turn_rewards(self, trajectory: Trajectory) -> np.ndarray:
        """Return the reward of each turn, [turns], less the KL of its tokens; the last one less the length penalty."""
        rewards = rewards_of_turns(trajectory)
        if weight := self.kl_weight("reward"):
            kl = np.cumsum(self.kl_of_tokens(trajectory).numpy(), dtype=np.float64)[turn_ends(trajectory)]
            rewards -= weight * np.diff(kl, prepend=0.0)
        rewards[-1:] -= self.overlong_penalty(trajectory)
        return rewards

    def denominator(self, batch: Batch) -> Tensor:
        """Count what the loss is a mean over: tokens, or episodes."""
        if self.config.loss_aggregation == "token_mean":
            return super().denominator(batch)
        return (document_weights(batch) * episode_shares(batch)).sum(dtype=torch.float64)

    def token_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the loss, which `constant_length` gives one of its own: [B, T]."""
        if self.config.loss_aggregation == "constant_length":
            return batch.loss_weights / self.context.max_new_tokens
        return self.metric_coefficients(batch)

    def metric_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the sums of metrics: their quotient by `denominator` is the mean over
        tokens, or over episodes of the mean over their tokens, [B, T]."""
        if self.config.loss_aggregation == "token_mean":
            return batch.loss_weights
        tokens = sums(torch.ones_like(batch.loss_weights), batch).clamp(min=1)
        return (
            batch.loss_weights / broadcast_to_tokens(tokens, batch) * broadcast_to_tokens(episode_shares(batch), batch)
        )

    def log_ratio(self, logprobs: Tensor, old: Tensor, batch: Batch) -> Tensor:
        """Return log π / π_old of each token, or at each token its mean over the sample: [B, T]."""
        log_ratio = logprobs - old
        if self.config.importance_sampling_level == "token":
            return log_ratio
        tokens = sums(torch.ones_like(log_ratio), batch).clamp(min=1)
        means = broadcast_to_tokens(sums(log_ratio.detach(), batch) / tokens, batch)
        return means + logprobs - logprobs.detach()  # its gradient is that of each token


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
