"""The policy's loss in every recipe of ptf with rollouts: PPO's clipped objective, with truncated importance sampling.

grpo/recipe.py defines it; what GRPO, PPO and on-policy distillation do not share is in their own files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.trajectory import Trajectory
from ptf.model.chunked import TokenLogprobs, sampled_from, surrogate, token_logprobs
from ptf.model.model import Model
from ptf.recipes.documents import sums
from ptf.recipes.online import OnlineConfig, RewardedConfig
from ptf.recipes.protocol import FrozenModelSpec, Metrics, Recipe


@dataclass(frozen=True)
class ClippedPolicy(Recipe):
    """The clipped objective of given advantages, a mean over tokens."""

    config: OnlineConfig
    reads_processing: ClassVar[bool] = True

    @property
    def tis_cap(self) -> float | None:
        """`algo.tis_cap`, of which `auto` was replaced by its value for the job (`AlgoConfig.in_force`)."""
        assert self.config.tis_cap != "auto"
        return self.config.tis_cap

    @property
    def update_epochs(self) -> int:
        """`algo.update_epochs`."""
        return self.config.update_epochs

    @property
    def num_minibatches(self) -> int:
        """`algo.num_minibatches`."""
        return self.config.num_minibatches

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether π_old's log-probs must be known before the update: several steps are made from the same rollouts."""
        return self.update_epochs * self.num_minibatches > 1

    def token_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the loss, a sum that the step divides by `denominator`: [B, T]."""
        return self.metric_coefficients(batch)

    def metric_coefficients(self, batch: Batch) -> Tensor:
        """Return the coefficient of each token in the sums of metrics, [B, T], which the step divides alike."""
        return batch.loss_weights

    def log_ratio(self, logprobs: Tensor, old: Tensor, batch: Batch) -> Tensor:
        """Return log π / π_old of each token, [B, T]."""
        return logprobs - old

    def kl_weight(self, place: Literal["loss", "reward"]) -> float:
        """Return the weight of the KL to the reference in the loss, or in the reward."""
        return 0.0

    def kl_to_reference(self, logprobs: Tensor, batch: Batch) -> Tensor | None:
        """Return the estimated KL to the reference of each token, [B, T]; None without a reference."""
        return None

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the clipped objective summed over tokens, with entropy, clipping and KL metrics."""
        if self.can_fuse_policy_gradient(batch):
            return self.loss_at_ratio_one(model, batch)
        outputs = batch.through(model, partial(token_logprobs, **sampled_from(batch, self.context.processing)))
        logprobs, entropy = outputs.logprobs, outputs.entropy  # [B, T]
        advantages, rollout = batch.token_columns["advantages"], batch.token_columns["rollout_logprobs"]
        # Without old_logprobs this is the only step from these rollouts, so π_old is the policy.
        old = batch.token_columns.get("old_logprobs", logprobs.detach())
        log_ratio = self.log_ratio(logprobs, old, batch)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
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
        if self.config.entropy_coef:
            per_token = per_token - self.config.entropy_coef * entropy
        if (kl := self.kl_to_reference(logprobs, batch)) is not None:
            metrics["kl_reference"] = (kl * coefficients).sum()
            if weight := self.kl_weight("loss"):
                per_token = per_token + weight * kl
        loss = (per_token * self.token_coefficients(batch)).sum()
        return loss, {k: v.detach() for k, v in {"loss": loss, **metrics}.items()}

    def can_fuse_policy_gradient(self, batch: Batch) -> bool:
        """Return whether the derivative of the loss with respect to each log-prob is known before the forward pass.

        It is − advantage × coefficient in the only optimizer step from these rollouts, where every ratio is 1, if the
        loss has no TIS, entropy bonus or KL term. Of a subclass with `policy_losses` of its own it is not known.
        """
        return not (
            "old_logprobs" in batch.token_columns
            or type(self).policy_losses is not ClippedPolicy.policy_losses
            or self.tis_cap is not None
            or self.config.entropy_coef
            or self.kl_weight("loss")
        )

    def loss_at_ratio_one(self, model: Model, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return what `loss` returns, for a batch with `can_fuse_policy_gradient`."""
        coefficients = batch.token_columns["advantages"] * self.token_coefficients(batch)
        head_fn = partial(surrogate, **sampled_from(batch, self.context.processing), coefficients=coefficients)
        loss, outputs = batch.through(model, head_fn)
        return loss, {
            "loss": loss.detach(),
            "entropy": (outputs.entropy * self.metric_coefficients(batch)).sum(),
            "clip_share": torch.zeros_like(loss),
            "approx_kl": torch.zeros_like(loss),
            **self.logprob_differences(outputs, batch),
        }

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
            "logprob_diff_share": ((difference > self.context.logprob_diff_threshold) * coefficients).sum(),
            "logprob_diff_max": difference.max(),
        }

    def policy_losses(self, ratio: Tensor, clipped: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
        """Return the loss of each token, [B, T], before its weight, from π / π_old and the clipped π / π_old.

        The value of CISPO's loss is − clipped · advantage; its gradient is that of − clipped · advantage · log π.
        """
        if self.config.policy_loss == "cispo":
            return -(clipped.detach() * advantages) * (1 + logprobs - logprobs.detach())
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.config.dual_clip is None:
            return losses
        return torch.where(advantages < 0, torch.minimum(losses, -self.config.dual_clip * advantages), losses)

    def importance_weights(self, log_weights: Tensor, cap: float, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weight of each token and whether it was beyond the cap, [B, T], from log π_old − log π_engine."""
        if self.config.tis_level == "sequence":
            log_weights = broadcast_to_tokens(sums(log_weights, batch), batch)
        weights = log_weights.exp()
        if self.config.tis_mode == "mask":
            beyond = (weights > cap) | (weights < 1 / cap)
            return weights.masked_fill(beyond, 0.0), beyond
        return weights.clamp(max=cap), weights > cap


@dataclass(frozen=True)
class RewardedPolicy(ClippedPolicy):
    """What GRPO and PPO share beyond the clipped objective: a KL to the reference, and what a reward loses."""

    config: RewardedConfig

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The reference, if a KL to it has a weight."""
        return {"reference": FrozenModelSpec()} if self.config.kl_coef else {}

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether π_old's log-probs must be known before the update: `compute_advantages` may read them, too."""
        return super().needs_old_logprobs or self.kl_weight("reward") > 0

    def kl_weight(self, place: Literal["loss", "reward"]) -> float:
        """Return `algo.kl_coef` if `algo.kl_in` is this place, else 0."""
        return self.config.kl_coef if self.config.kl_in == place else 0.0

    def kl_to_reference(self, logprobs: Tensor, batch: Batch) -> Tensor | None:
        """Return the estimated KL to the reference of each token, [B, T]; None if it has no weight."""
        if not self.config.kl_coef:
            return None
        return estimate_kl(self.config.kl_estimator, logprobs, batch.token_columns["reference_logprobs"])

    def kl_of_tokens(self, trajectory: Trajectory) -> Tensor:
        """Return the estimated KL to the reference of each sampled token, [n]."""
        old, reference = (
            torch.from_numpy(trajectory.token_columns[name]) for name in ("old_logprobs", "reference_logprobs")
        )
        return estimate_kl(self.config.kl_estimator, old, reference)

    def is_trained(self, trajectory: Trajectory) -> bool:
        """Return whether an episode with a result is trained on."""
        return trajectory.complete or not self.config.overlong_filter

    def overlong_penalty(self, trajectory: Trajectory) -> float:
        """Return what is subtracted from the reward of an episode for its length: 0 up to `overlong_buffer_tokens`
        before the longest length, then linearly up to 1 (DAPO, Yu et al. 2025, eq. 13)."""
        margin = self.config.overlong_buffer_tokens
        beyond = trajectory.num_sampled_tokens - self.context.max_new_tokens + margin
        return min(1.0, max(0.0, beyond / margin)) if margin else 0.0


def broadcast_to_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Return the value of each token's document, [documents] → [B, T]; padding gets the value of the first document."""
    return values[batch.segments.clamp(min=0)]


def estimate_kl(kind: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) from a token that π sampled (Schulman 2020)."""
    log_ratio = logprobs - reference
    if kind == "k3":
        return (-log_ratio).exp() + log_ratio - 1
    return log_ratio if kind == "k1" else log_ratio.square() / 2
