"""AdamW and its learning rates. The schedule is a function of the step, so it has no state to save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ptf.config.sections.train import TrainConfig
from ptf.train.trainable import matches, raise_if_unmatched


@dataclass(frozen=True, slots=True)
class Schedule:
    """A linear warm-up, a plateau, then a decay over the last `decay` steps (all steps after the warm-up if None)."""

    lr: float
    steps: int
    shape: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: int = 0
    decay: int | None = None
    floor: float = 0.0  # share of lr at the end

    @classmethod
    def of(cls, config: TrainConfig, steps: int) -> "Schedule":
        """Build the schedule of a run of that many steps. `train.warmup_steps` and `train.lr_decay_steps` below 1 are
        shares of it, at least one step."""
        warmup, decay = (
            max(1, round(part * steps)) if isinstance(part, float) else part
            for part in (config.warmup_steps, config.lr_decay_steps)
        )
        return cls(config.lr, steps, config.schedule, warmup or 0, decay, config.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step with this number, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        decay = self.steps - self.warmup if self.decay is None else self.decay
        done = max(0.0, (step - (self.steps - decay)) / decay) if decay else 0.0
        if self.shape == "constant" or not done:
            return self.lr
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.floor + (1 - self.floor) * left)


def groups(model: nn.Module, weight_decay: float, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: what trains, by the first pattern of `factors` that matches; only
    matrices get weight decay. The factor of the schedule's learning rate is the group's `factor`.

    Raises UserError if a pattern matches no parameter that trains.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    raise_if_unmatched("train.lr_multipliers", factors, list(named))
    by_key: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        factor = next((factor for pattern, factor in factors.items() if matches(name, pattern)), 1.0)
        by_key.setdefault((factor, weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    return [{"params": params, "weight_decay": decay, "factor": factor} for (factor, decay), params in by_key.items()]
