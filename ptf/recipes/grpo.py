"""Group-relative policy optimisation (Shao et al., DeepSeekMath, 2024): PPO's clipped objective without a critic.

    Â  = (r − mean(r of the group)) / std(r of the group)                for every token of an answer
    J  = mean over tokens of  min(ρ Â, clip(ρ, 1 − clip_low, 1 + clip_high) Â) − kl · k3(π_ref ‖ π),     ρ = π / π_old
    k3 = π_ref / π − log(π_ref / π) − 1                                   (Schulman 2020, unbiased and never negative)

The mean is over all tokens of the optimizer step (as in DAPO, Yu et al. 2025), not over answers first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.sample import Atom, Sample
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory
from ptf.model.chunked import token_logprobs
from ptf.model.decoder import Decoder
from ptf.recipes import Companion, Metrics
from ptf.recipes.advantages import group_relative


@dataclass(frozen=True)
class GRPO:
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    scale_by_std: bool = True
    epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    online: ClassVar[bool] = True
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

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
            advantages = group_relative(np.array([t.outcome.value for t in scored]), self.scale_by_std)  # type: ignore[union-attr]
            atoms += [(sample_of(t, advantage=a),) for t, a in zip(scored, advantages, strict=True)]
        return atoms

    def units(self, batch: Batch) -> Tensor:
        return batch.weights.sum(dtype=torch.float64)

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        reduce = partial(token_logprobs, targets=batch.targets, weights=batch.weights, temperature=self.temperature)
        logprobs, entropy = model(batch.tokens, batch.positions, batch.segments, reduce)  # [B, T]
        advantages, old = batch.streams["advantages"], batch.streams["old_logprobs"]
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        metrics = {
            "entropy": (entropy * batch.weights).sum(),
            "clip_share": ((clipped * advantages < ratio * advantages) * batch.weights).sum(),
            "kl_old": ((ratio - 1 - (logprobs - old)) * batch.weights).sum(),
        }
        if self.kl:
            log_ratio = batch.streams["reference_logprobs"] - logprobs
            k3 = log_ratio.exp() - log_ratio - 1
            per_token = per_token + self.kl * k3
            metrics["kl_reference"] = (k3 * batch.weights).sum()
        loss = (per_token * batch.weights).sum()
        return loss, {k: v.detach() for k, v in {"loss": loss, **metrics}.items()}


def sample_of(trajectory: Trajectory, advantage: float = 0.0) -> Sample:
    """One answer as a sample: the context is not trained, every sampled token is."""
    (call,) = trajectory.calls
    c, n = len(call.context), len(call.sampled)
    after = lambda values: np.concatenate([np.zeros(c, np.float32), np.asarray(values, np.float32)])  # noqa: E731
    streams = {"advantages": after(np.full(n, advantage))} | {name: after(values) for name, values in trajectory.streams.items()}
    return Sample(np.concatenate([call.context, call.sampled]).astype(np.int32), after(np.ones(n)), trajectory.prompt.source, streams)
