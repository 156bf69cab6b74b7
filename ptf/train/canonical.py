"""The deterministic mode: a step's result is the same to the bit however its rows are split into passes and dealt to ranks.

The one idea: floating-point addition depends on its order, so the order is fixed. Each row is trained by itself, from gradients of zero; the rows'
gradients and metrics are then added one after the other by the row's number in the global step, on every rank alike. That needs the whole
model on every rank and a gradient for each row, so it is for small models.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptf.compute.world import World
from ptf.config.schema import TrainConfig
from ptf.data.batch import Batch
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes.protocol import Recipe
from ptf.train.trainer import LARGEST, Means, Trainer

MOST_BYTES = 4 << 30  # of the gradients of a rank's rows


class CanonicalTrainer(Trainer):
    """Of a model that is whole on every rank. Batches hold one row each."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        torch.set_num_threads(1)  # more of them add in an order that depends on how many there are

    def refuse_large(self, rows: int) -> None:
        size = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad) * rows // self.world.size
        if size > MOST_BYTES:
            raise UserError(
                f"train.deterministic keeps a gradient for each row, {size / 2**30:.1f} GiB on every worker here, and is for models that need "
                f"less than {MOST_BYTES / 2**30:g}: lower train.rows, or leave it off"
            )

    def passes(self, micro: Sequence[Batch], recipe: Recipe, rows: Sequence[int]) -> Means:
        world, parameters = self.world, [p for p in self.model.parameters() if p.requires_grad]
        assert all(len(batch.tokens) == 1 for batch in micro), "one row a batch"
        owners: list[tuple[int, int]] = [(0, 0)] * (len(rows) * world.size)  # of each row of the global step: rank, and which of its rows
        for rank, numbers in enumerate(self.world.gather(list(rows))):
            for k, number in enumerate(numbers):
                owners[number] = rank, k
        every = self.world.gather([float(recipe.units(batch)) for batch in micro])
        units = 0.0
        for rank, k in owners:
            units += every[rank][k]
        if not units:
            return {}, units
        gradients, found = [], []
        for batch in micro:
            loss, metrics = self.loss(batch, recipe)
            (loss / units).backward()
            gradients.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]))
            self.optimizer.zero_grad(set_to_none=True)
            found.append({name: float(value.detach().double()) for name, value in metrics.items()})
        total, values = torch.zeros_like(gradients[0]), self.world.gather(found)
        sums: dict[str, float] = {}
        largest: dict[str, float] = {}
        for rank, k in owners:
            total += self._from(rank, gradients[k] if rank == world.rank else torch.empty_like(total))
            for name, value in values[rank][k].items():
                if name.startswith(LARGEST):
                    largest[name] = max(largest.get(name, 0.0), math.inf if math.isnan(value) else value)
                else:
                    sums[name] = sums.get(name, 0.0) + value
        at = 0
        for p in parameters:
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        return {name: value / units for name, value in sums.items()} | largest, units

    def _from(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        if self.world.size > 1:
            dist.broadcast(value, src=rank)
        return value


def trainer_of(train: TrainConfig, model: Decoder, world: World, companions: Mapping[str, Decoder] | None = None) -> Trainer:
    """The deterministic one where the job asks for it."""
    return (CanonicalTrainer if train.deterministic else Trainer)(model, world, train, companions)
