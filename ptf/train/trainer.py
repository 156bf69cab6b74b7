"""One model, its optimizer, one step. SFT calls `step` in a loop; RL's policy role calls it too."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.compute.world import World
from ptf.config.schema import TrainConfig
from ptf.data.batch import Batch
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import Family
from ptf.model.plan import parallelize
from ptf.recipes import Recipe
from ptf.train.optim import Schedule, adamw


def load_model(directory: Path, world: World, *, init: str, seed: int, precision: str) -> tuple[Decoder, Family]:
    """A sharded model with its weights: read from the directory, or drawn from the seed."""
    model, family = bridge.build(directory)
    parallelize(model, world.mesh, precision)
    bridge.materialize(model, world.device)
    if init == "random":
        bridge.random_init(model, seed)
    else:
        bridge.load_hf(model, directory, family)
    return model, family


class Trainer:
    def __init__(self, model: Decoder, world: World, config: TrainConfig, companions: Mapping[str, Decoder] | None = None) -> None:
        self.model, self.world, self.companions = model, world, companions or {}
        self.clip = config.clip
        self.schedule = Schedule(config.lr, config.steps, config.schedule, config.warmup, config.decay, config.min_lr)
        self.optimizer = adamw(model, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def step(self, micro: Sequence[Batch], recipe: Recipe, step: int) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches; every rank brings equally many. `step` sets the learning rate.

        Metrics are means over the recipe's units on all ranks. Raises FloatingPointError, before any weight changes, if the loss or the
        gradient is not finite.
        """
        world = self.world
        micro = [batch.to(world.device) for batch in micro]
        units = float(world.sum(sum((recipe.units(b).cpu() for b in micro), torch.zeros((), dtype=torch.float64))))
        totals: dict[str, torch.Tensor] = {}
        for i, batch in enumerate(micro):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(i == len(micro) - 1)
            loss, metrics = recipe.loss(self.model, batch, self.companions)
            (loss * (world.size / units)).backward()  # FSDP averages over ranks; the units are already everyone's
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
        sums = world.sum(torch.stack(list(totals.values())))
        means = {name: float(value) / units for name, value in zip(totals, sums, strict=True)}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not (math.isfinite(means["loss"]) and math.isfinite(grad_norm)):
            raise FloatingPointError(f"step {step}: loss {means['loss']}, gradient norm {grad_norm}; the weights are as before this step")
        lr = self.schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**means, "grad_norm": grad_norm, "lr": lr, "units": units}
