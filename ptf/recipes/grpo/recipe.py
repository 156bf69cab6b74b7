"""Group-relative policy optimisation (Shao et al., DeepSeekMath, 2024) and its family: PPO's clipped objective without a critic.

    Â  = (r − b) / std(r of the group)                                  for every token of an answer; b: the mean of the group's rewards, or of the
                                                                        others' (leave-one-out: RLOO, Ahmadian et al. 2024, eq. 8, which has no std)
    J  = mean of  w · min(ρ Â, clip(ρ, 1 − clip_low, 1 + clip_high) Â) − kl · K(π_ref, π),     ρ = π / π_old
    ρ  of a token; or of an answer, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, eq. 7 and 14)
    + c_H H(π)  with `entropy`, of each token's distribution
    w  = min(π_old / π_rollout, C): what the engine sampled from is not quite the trainer's π_old (truncated importance sampling, Yao et al. 2025)
    K  = log π/π_ref (k1), (log π/π_ref)² / 2 (k2), π_ref/π − log π_ref/π − 1 (k3)          (Schulman 2020); in the loss, or taken from the reward

The mean is over all tokens of the optimizer step (DAPO, Yu et al. 2025, eq. 8), over answers of the means over their tokens (GRPO, eq. 3), or over answers
of the sums over their tokens divided by the largest length (Dr.GRPO, Liu et al. 2025, section 3.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory, samples_of
from ptf.model.chunked import Said, surrogate, token_logprobs
from ptf.model.decoder import Decoder
from ptf.model.sampling import AS_IT_IS, Processing
from ptf.recipes.advantages import group_relative, leave_one_out, overlong
from ptf.recipes.documents import sums, weights
from ptf.recipes.protocol import Companion, Critic, Metrics


@dataclass(frozen=True)
class GRPO:
    clip_low: float = 0.2
    clip_high: float = 0.2
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale_by_std: bool = True
    ratio: Literal["token", "answer"] = "token"
    mean_over: Literal["tokens", "answers", "length"] = "tokens"
    kl: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    max_importance: float | None = None
    entropy: float = 0.0
    overlong: int = 0
    epochs: int = 1
    minibatches: int = 1
    how: Processing = AS_IT_IS  # what answers were drawn from
    length: int = 1  # the longest answer there may be
    online: ClassVar[bool] = True
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    @property
    def critic(self) -> Critic | None:
        """What a critic is trained by, where there is one."""
        return None

    @property
    def companions(self) -> Mapping[str, Companion]:
        return {"reference": Companion()} if self.kl else {}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[Atom]:
        raise NotImplementedError("GRPO trains on rollouts; rows become prompts (ptf.data.encode.encode_prompt)")

    def credit(self, groups: Sequence[Group]) -> list[Atom]:
        """Answers without a result enter no baseline and are not trained on; of a group with fewer than two results nothing is."""
        atoms: list[Atom] = []
        for group in groups:
            scored = [t for t in group if isinstance(t.outcome, Reward)]
            if len(scored) < 2:
                continue
            rewards = np.array([self.reward(t) for t in scored])
            advantages = leave_one_out(rewards) if self.baseline == "leave_one_out" else group_relative(rewards, self.scale_by_std)
            atoms += [(sample,) for t, a in zip(scored, advantages, strict=True) for sample in samples_of(t, a)]
        return atoms

    def reward(self, trajectory: Trajectory) -> float:
        """What the reward said, less what an answer of its length and of its distance from the reference costs."""
        assert isinstance(trajectory.outcome, Reward)
        value = trajectory.outcome.value + overlong(trajectory.sampled, self.length, self.overlong)
        if self.kl and self.kl_in == "reward":
            streams = {name: torch.from_numpy(trajectory.streams[name]) for name in ("old_logprobs", "reference_logprobs")}
            value -= self.kl * float(estimate(self.kl_estimator, streams["old_logprobs"], streams["reference_logprobs"]).sum())
        return value

    def units(self, batch: Batch) -> Tensor:
        return (batch.weights if self.mean_over == "tokens" else weights(batch)).sum(dtype=torch.float64)

    def foreseen(self, batch: Batch) -> bool:
        """Whether the gradient of every log-prob is known before it is: in the only step from these rollouts, where nothing else is in the loss."""
        return not ("old_logprobs" in batch.streams or self.max_importance is not None or self.entropy or (self.kl and self.kl_in == "loss"))

    def at_itself(self, model: Decoder, batch: Batch) -> tuple[Tensor, Metrics]:
        """`loss` where π_old is the policy: every ratio is 1."""
        counts = self.counts(batch)
        reduce = partial(surrogate, **self.drawn(batch), coefficients=batch.streams["advantages"] * counts)
        loss, said = model(batch.tokens, batch.positions, batch.segments, reduce)
        metrics = {"loss": loss.detach(), "entropy": (said.entropy * counts).sum(), "clip_share": torch.zeros_like(loss), "kl_old": torch.zeros_like(loss)}
        return loss, metrics | self.apart(said, batch, counts)

    def drawn(self, batch: Batch) -> dict[str, Any]:
        """Which tokens were drawn, and from what."""
        return {"targets": batch.targets, "weights": batch.weights, "how": self.how, "states": batch.streams.get("states")}

    def apart(self, said: Said, batch: Batch, counts: Tensor) -> Metrics:
        """How far the engine's log-probs are from the trainer's, beyond what rounding makes of where a nucleus ends."""
        far = ((said.logprobs.detach() - batch.streams["rollout_logprobs"]).abs() - said.slack).clamp(min=0) * (batch.weights != 0)
        return {"logprob_diff_mean": (far * counts).sum(), "max_logprob_diff": far.max()}

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        if self.foreseen(batch):
            return self.at_itself(model, batch)
        said = model(batch.tokens, batch.positions, batch.segments, partial(token_logprobs, **self.drawn(batch)))
        logprobs, entropy = said.logprobs, said.entropy  # [B, T]
        advantages, rollout = batch.streams["advantages"], batch.streams["rollout_logprobs"]
        old = batch.streams.get("old_logprobs", logprobs.detach())  # not there: this is the one step from these rollouts, and π_old is the policy
        moved = logprobs - old
        if self.ratio == "answer":
            moved = self.of_answers(moved.detach(), batch) + logprobs - logprobs.detach()  # its value is the answer's, its gradient each token's
        ratio = moved.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        counts = self.counts(batch)
        metrics = {
            "entropy": (entropy * counts).sum(),
            "clip_share": ((clipped * advantages < ratio * advantages) * counts).sum(),
            "kl_old": ((ratio - 1 - moved) * counts).sum(),
        }
        if "old_logprobs" not in batch.streams:
            metrics |= self.apart(said, batch, counts)
        if self.max_importance is not None:
            trust = (old - rollout).exp()
            per_token = per_token * trust.clamp(max=self.max_importance)
            metrics["importance_capped"] = ((trust > self.max_importance) * counts).sum()
        if self.entropy:
            per_token = per_token - self.entropy * entropy
        if self.kl:
            apart = estimate(self.kl_estimator, logprobs, batch.streams["reference_logprobs"])
            metrics["kl_reference"] = (apart * counts).sum()
            if self.kl_in == "loss":
                per_token = per_token + self.kl * apart
        loss = (per_token * counts).sum()
        return loss, {k: v.detach() for k, v in {"loss": loss, **metrics}.items()}

    @property
    def needs_old(self) -> bool:
        """Whether π_old's log-probs must be known before the update: where there are several steps from the same rollouts, or credit looks at them."""
        return self.epochs * self.minibatches > 1 or bool(self.kl and self.kl_in == "reward")

    def counts(self, batch: Batch) -> Tensor:
        """How much each token counts in the sum that the step divides by `units`: [B, T]."""
        if self.mean_over == "tokens":
            return batch.weights
        if self.mean_over == "length":
            return batch.weights / self.length
        tokens = sums(torch.ones_like(batch.weights), batch).clamp(min=1)
        return batch.weights / spread(tokens, batch)

    def of_answers(self, values: Tensor, batch: Batch) -> Tensor:
        """The mean over each answer's tokens, at every one of them: [B, T]."""
        tokens = sums(torch.ones_like(values), batch).clamp(min=1)
        return spread(sums(values, batch) / tokens, batch)


def spread(values: Tensor, batch: Batch) -> Tensor:
    """What is known of documents, [documents], at each of their positions: [B, T]; padding gets any of them."""
    return values[batch.segments.clamp(min=0)]


def estimate(kind: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Of KL(π ‖ π_ref), from a token that π sampled (Schulman 2020)."""
    moved = logprobs - reference
    if kind == "k3":
        return (-moved).exp() + moved - 1
    return moved if kind == "k1" else moved.square() / 2
