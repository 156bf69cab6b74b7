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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ptf.config.logprob_limits import LOGPROB_LIMITS
from ptf.data.batch import Batch
from ptf.data.sample import PackUnit
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory, samples_of
from ptf.model.chunked import TokenLogprobs, sampled_from, surrogate, token_logprobs
from ptf.model.decoder import Decoder
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing
from ptf.recipes.advantages import group_relative, leave_one_out, overlong_penalty
from ptf.recipes.documents import document_weights, episode_shares, sums
from ptf.recipes.grpo.config import GRPOConfig
from ptf.recipes.protocol import CriticRecipe, FrozenModelSpec, Metrics
from ptf.recipes.turns import leave_one_out_by_turn, rewards_of_turns, rewards_to_go, turn_ends


@dataclass(frozen=True)
class GRPO:
    """The clipped objective with advantages relative to a group; see the module's docstring."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale_by_std: bool = True
    importance_sampling_level: Literal["token", "sequence"] = "token"
    loss_aggregation: Literal["token_mean", "episode_mean", "constant_length"] = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    tis_cap: float | None = None
    tis_level: Literal["token", "sequence"] = "token"
    tis_mode: Literal["truncate", "mask"] = "truncate"
    policy_loss: Literal["clip", "cispo"] = "clip"
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_filter: bool = False
    credit_level: Literal["episode", "turn"] = "episode"
    turn_discount: float = 1.0
    update_epochs: int = 1
    num_minibatches: int = 1
    processing: LogitsProcessing = NO_LOGITS_PROCESSING  # the distribution that responses were drawn from
    max_new_tokens: int = 1  # the largest number of tokens of a response
    # tokens whose log-probs in engine and trainer differ by more are counted
    logprob_diff_threshold: float = LOGPROB_LIMITS["fp32"].threshold
    online: ClassVar[bool] = GRPOConfig.online
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    @property
    def critic(self) -> CriticRecipe | None:
        """The recipe that trains the critic; GRPO has none."""
        return None

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The reference, if a KL to it has a weight."""
        return {"reference": FrozenModelSpec()} if self.kl_coef else {}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Raise NotImplementedError: rows become prompts, and rollouts are trained on."""
        raise NotImplementedError("GRPO trains on rollouts; rows become prompts (ptf.data.encode.encode_prompt)")

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
        if self.credit_level == "turn":
            returns = [rewards_to_go(self.turn_rewards(t), self.turn_discount) for t in group]
            by_turn = leave_one_out_by_turn(returns)
            return [np.repeat(a, t.turn_lengths) for t, a in zip(group, by_turn, strict=True)]
        rewards = np.array([self.reward(t) for t in group])
        if self.baseline == "leave_one_out":
            return list(leave_one_out(rewards))
        return list(group_relative(rewards, self.scale_by_std))

    def is_trained(self, trajectory: Trajectory) -> bool:
        """Return whether an episode with a result is trained on."""
        return trajectory.complete or not self.overlong_filter

    def reward(self, trajectory: Trajectory) -> float:
        """Return the reward, less the penalties for the response's length and its distance from the reference."""
        assert isinstance(trajectory.outcome, Reward)
        value = trajectory.outcome.value - self.overlong_penalty(trajectory)
        if self.kl_coef and self.kl_in == "reward":
            value -= self.kl_coef * float(self.kl_of_tokens(trajectory).sum())
        return value

    def turn_rewards(self, trajectory: Trajectory) -> np.ndarray:
        """Return the reward of each turn, [turns], less the KL of its tokens; the last one less the length penalty."""
        rewards = rewards_of_turns(trajectory)
        if self.kl_coef and self.kl_in == "reward":
            kl = np.cumsum(self.kl_of_tokens(trajectory).numpy(), dtype=np.float64)[turn_ends(trajectory)]
            rewards -= self.kl_coef * np.diff(kl, prepend=0.0)
        rewards[-1:] -= self.overlong_penalty(trajectory)
        return rewards

    def overlong_penalty(self, trajectory: Trajectory) -> float:
        """Return what is subtracted from the reward of an episode for its length; 0 without
        `overlong_buffer_tokens`."""
        return overlong_penalty(trajectory.num_sampled_tokens, self.max_new_tokens, self.overlong_buffer_tokens)

    def kl_of_tokens(self, trajectory: Trajectory) -> Tensor:
        """Return the estimated KL to the reference of each sampled token, [n]."""
        old, reference = (
            torch.from_numpy(trajectory.token_columns[name]) for name in ("old_logprobs", "reference_logprobs")
        )
        return estimate_kl(self.kl_estimator, old, reference)

    def denominator(self, batch: Batch) -> Tensor:
        """Count what the loss is a mean over: tokens, or episodes."""
        if self.loss_aggregation == "token_mean":
            return batch.loss_weights.sum(dtype=torch.float64)
        return (document_weights(batch) * episode_shares(batch)).sum(dtype=torch.float64)

    def can_fuse_policy_gradient(self, batch: Batch) -> bool:
        """Return whether the derivative of the loss with respect to each log-prob is known before the forward pass.

        It is − advantage × coefficient in the only optimizer step from these rollouts, where every ratio is 1, if the
        loss has no TIS, entropy bonus or KL term.
        """
        return not (
            "old_logprobs" in batch.token_columns
            or self.tis_cap is not None
            or self.entropy_coef
            or (self.kl_coef and self.kl_in == "loss")
        )

    def loss_at_ratio_one(self, model: Decoder, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return what `loss` returns, for a batch with `can_fuse_policy_gradient`."""
        coefficients = batch.token_columns["advantages"] * self.token_coefficients(batch)
        head_fn = partial(surrogate, **sampled_from(batch, self.processing), coefficients=coefficients)
        loss, outputs = model(batch.tokens, batch.positions, batch.segments, head_fn, varlen=batch.varlen)
        metrics = {
            "loss": loss.detach(),
            "entropy": (outputs.entropy * self.metric_coefficients(batch)).sum(),
            "clip_share": torch.zeros_like(loss),
            "approx_kl": torch.zeros_like(loss),
        }
        return loss, metrics | self.logprob_differences(outputs, batch)

    def logprob_differences(self, outputs: TokenLogprobs, batch: Batch) -> Metrics:
        """Return metrics of the difference between the engine's and the trainer's log-probs.

        A difference that rounding at the edge of a nucleus explains (`TokenLogprobs.slack`) is subtracted.
        """
        coefficients = self.metric_coefficients(batch)
        difference = (
            (outputs.logprobs.detach() - batch.token_columns["rollout_logprobs"]).abs() - outputs.slack
        ).clamp(min=0) * (batch.loss_weights != 0)
        return {
            "logprob_diff_mean": (difference * coefficients).sum(),
            "logprob_diff_share": ((difference > self.logprob_diff_threshold) * coefficients).sum(),
            "logprob_diff_max": difference.max(),
        }

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        """Return the clipped objective summed over tokens, with entropy, clipping and KL metrics."""
        if self.can_fuse_policy_gradient(batch):
            return self.loss_at_ratio_one(model, batch)
        head_fn = partial(token_logprobs, **sampled_from(batch, self.processing))
        outputs = model(batch.tokens, batch.positions, batch.segments, head_fn, varlen=batch.varlen)
        logprobs, entropy = outputs.logprobs, outputs.entropy  # [B, T]
        advantages, rollout = batch.token_columns["advantages"], batch.token_columns["rollout_logprobs"]
        # Without old_logprobs this is the only step from these rollouts, so π_old is the policy.
        old = batch.token_columns.get("old_logprobs", logprobs.detach())
        log_ratio = logprobs - old
        if self.importance_sampling_level == "sequence":
            # its value is the mean over the sample, its gradient that of each token
            log_ratio = self.sample_means(log_ratio.detach(), batch) + logprobs - logprobs.detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = self.policy_losses(ratio, clipped, advantages, logprobs)
        coefficients = self.metric_coefficients(batch)
        metrics = {
            "entropy": (entropy * coefficients).sum(),
            "clip_share": ((clipped * advantages < ratio * advantages) * coefficients).sum(),
            "approx_kl": ((ratio - 1 - log_ratio) * coefficients).sum(),
        }
        if "old_logprobs" not in batch.token_columns:
            metrics |= self.logprob_differences(outputs, batch)
        if self.tis_cap is not None:
            weights, beyond = self.importance_weights(old - rollout, self.tis_cap, batch)
            per_token = per_token * weights
            metrics["tis_beyond_share"] = (beyond * coefficients).sum()
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * entropy
        if self.kl_coef:
            kl = estimate_kl(self.kl_estimator, logprobs, batch.token_columns["reference_logprobs"])
            metrics["kl_reference"] = (kl * coefficients).sum()
            if self.kl_in == "loss":
                per_token = per_token + self.kl_coef * kl
        loss = (per_token * self.token_coefficients(batch)).sum()
        return loss, {k: v.detach() for k, v in {"loss": loss, **metrics}.items()}

    def policy_losses(self, ratio: Tensor, clipped: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
        """Return the loss of each token, [B, T], before its weight, from π / π_old and the clipped π / π_old.

        The value of CISPO's loss is − clipped · advantage; its gradient is that of − clipped · advantage · log π.
        """
        if self.policy_loss == "cispo":
            return -(clipped.detach() * advantages) * (1 + logprobs - logprobs.detach())
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is None:
            return losses
        return torch.where(advantages < 0, torch.minimum(losses, -self.dual_clip * advantages), losses)

    def importance_weights(self, log_weights: Tensor, cap: float, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weight of each token and whether it was beyond the cap, [B, T], from log π_old − log π_engine."""
        if self.tis_level == "sequence":
            log_weights = broadcast_to_tokens(sums(log_weights, batch), batch)
        weights = log_weights.exp()
        if self.tis_mode == "mask":
            beyond = (weights > cap) | (weights < 1 / cap)
            return weights.masked_fill(beyond, 0.0), beyond
        return weights.clamp(max=cap), weights > cap

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether π_old's log-probs must be known before the update.

        They must where several steps are made from the same rollouts, or where `compute_advantages` reads them.
        """
        return self.update_epochs * self.num_minibatches > 1 or bool(self.kl_coef and self.kl_in == "reward")

    def token_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the loss, a sum that the step divides by `denominator`: [B, T]."""
        return (
            batch.loss_weights / self.max_new_tokens
            if self.loss_aggregation == "constant_length"
            else self.metric_coefficients(batch)
        )

    def metric_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the sums of metrics, which the step divides by `denominator`: [B, T].

        The quotient is the mean over tokens, or over episodes of the mean over their tokens.
        """
        if self.loss_aggregation == "token_mean":
            return batch.loss_weights
        tokens = sums(torch.ones_like(batch.loss_weights), batch).clamp(min=1)
        return (
            batch.loss_weights / broadcast_to_tokens(tokens, batch) * broadcast_to_tokens(episode_shares(batch), batch)
        )

    def sample_means(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the mean over each sample's tokens, at every one of them: [B, T]."""
        tokens = sums(torch.ones_like(values), batch).clamp(min=1)
        return broadcast_to_tokens(sums(values, batch) / tokens, batch)


def broadcast_to_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Return the value of each token's document, [documents] → [B, T]; padding gets the value of the first document."""
    return values[batch.segments.clamp(min=0)]


def estimate_kl(kind: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) from a token that π sampled (Schulman 2020)."""
    log_ratio = logprobs - reference
    if kind == "k3":
        return (-log_ratio).exp() + log_ratio - 1
    return log_ratio if kind == "k1" else log_ratio.square() / 2
