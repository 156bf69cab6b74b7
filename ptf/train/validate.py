"""Held-out metrics while training: the recipe's own loss, and what else it measures, over a finite, fixed set of rows."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ptf.compute.world import World
from ptf.data.sample import Atom
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes.protocol import Recipe
from ptf.train.deal import deal


@torch.no_grad()
def held_out_loss(
    model: Decoder, recipe: Recipe, sets: Mapping[str, Sequence[Sequence[Atom]]], world: World, micro_rows: int, width: int,
    companions: Mapping[str, Decoder],
) -> dict[str, float]:  # fmt: skip
    """Means per unit of each named set of packed rows, as `loss/NAME`, `accuracy/NAME`, … Raises UserError for a set without a unit."""
    out: dict[str, float] = {}
    for name, rows in sets.items():
        units, totals = torch.zeros((), dtype=torch.float64), {}
        for batch in deal(rows, world, micro_rows, width):
            batch = batch.to(world.device)
            _, metrics = recipe.loss(model, batch, companions)
            units += recipe.units(batch).cpu()
            for metric, value in metrics.items():
                if "/" not in metric:  # of one source: a held-out set is one
                    totals[metric] = totals.get(metric, 0.0) + value.double().cpu()
        count, *means = world.sum(torch.stack([units, *totals.values()])).tolist()
        if not count:
            raise UserError(f"data.validation.{name} has nothing to measure a loss by")
        out |= {f"{metric}/{name}": mean / count for metric, mean in zip(totals, means, strict=True)}
    return out


FEW_ROWS = 64  # packed rows, below which each of their documents is a row of its own


@torch.no_grad()
def held_out_losses(
    model: Decoder, recipe: Recipe, rows: Sequence[Sequence[Atom]], world: World, width: int, companions: Mapping[str, Decoder]
) -> np.ndarray:  # fmt: skip
    """Loss and denominator of each packed row that has one, on every rank: [rows, 2]; in an order that depends on the rows and on how many ranks there are."""
    if len(rows) < FEW_ROWS:
        rows = [[atom] for row in rows for atom in row]
    mine = []
    for batch in deal(rows, world, 1, width):
        batch = batch.to(world.device)
        _, metrics = recipe.loss(model, batch, companions)
        loss = metrics["divergence"] if "divergence" in metrics else metrics["loss"]
        mine.append([float(loss), float(recipe.units(batch))])
    found = np.concatenate([np.array(of) for rank, of in enumerate(world.gather(mine)) if rank % world.tensor == 0])  # a tensor group has the same
    return found[found[:, 1] > 0]
