"""Held-out loss while training: the recipe's own loss over a finite, fixed set of rows."""

from collections.abc import Mapping, Sequence

import torch

from ptf.compute.world import World
from ptf.data.sample import Atom
from ptf.model.decoder import Decoder
from ptf.recipes import Recipe
from ptf.train.deal import deal


@torch.no_grad()
def held_out_loss(model: Decoder, recipe: Recipe, sets: Mapping[str, Sequence[Sequence[Atom]]], world: World, micro_rows: int, width: int) -> dict[str, float]:
    """Mean loss per unit of each named set of packed rows, as `loss/NAME`."""
    out: dict[str, float] = {}
    for name, rows in sets.items():
        total = torch.zeros(2, dtype=torch.float64)
        for batch in deal(rows, world, micro_rows, width):
            batch = batch.to(world.device)
            loss, _ = recipe.loss(model, batch, {})
            total += torch.stack([loss.double().cpu(), recipe.units(batch).cpu()])
        loss, units = world.sum(total).tolist()
        out[f"loss/{name}"] = loss / units
    return out
