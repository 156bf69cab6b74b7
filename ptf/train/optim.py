"""AdamW and its learning rates. The schedule is a function of the step, so it has no state to save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ptf.config.schema import TrainConfig
from ptf.train.trainable import fits, refuse_unmatched


def counted(steps: int | float, whole: int) -> int:
    """Steps, given as their number or, below 1, as a share of a run's."""
    return steps if isinstance(steps, int) else max(1, round(steps * whole))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, a plateau, then a decay over the last `decay` steps (all after the warm-up if None)."""

    lr: float
    steps: int
    shape: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: int = 0
    decay: int | None = None
    floor: float = 0.0  # share of lr at the end

    @classmethod
    def of(cls, config: TrainConfig, steps: int) -> "Schedule":
        """Of a run of so many steps. `train.warmup` and `train.decay` below 1 are shares of it, of a step at least."""
        decay = None if config.decay is None else counted(config.decay, steps)
        return cls(config.lr, steps, config.schedule, counted(config.warmup, steps), decay, config.min_lr)

    def __call__(self, step: int) -> float:
        """Learning rate of the step with this number, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        decay = self.steps - self.warmup if self.decay is None else self.decay
        done = max(0.0, (step - (self.steps - decay)) / decay) if decay else 0.0
        if self.shape == "constant" or not done:
            return self.lr
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are trained alike."""

    factor: float  # of the schedule's learning rate
    weight_decay: float
    params: list[nn.Parameter]


def groups(model: nn.Module, weight_decay: float, factors: Mapping[str, float]) -> list[Group]:
    """What trains, by the first pattern of `factors` that fits; only matrices decay. Raises UserError for a pattern that fits nothing that trains."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    refuse_unmatched("train.lr_groups", factors, list(named))
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        factor = next((factor for pattern, factor in factors.items() if fits(name, pattern)), 1.0)
        found.setdefault((factor, weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    return [Group(*key, params) for key, params in found.items()]


def adamw(groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """Fused AdamW (4.5 times faster than foreach on a CPU), one of its groups for each of these."""
    made = [{"params": g.params, "weight_decay": g.weight_decay} for g in groups]
    return torch.optim.AdamW(made, lr=lr, betas=betas, eps=eps, fused=True)
