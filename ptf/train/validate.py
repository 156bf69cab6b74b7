"""Held-out metrics while training: the recipe's own loss and metrics over a finite, fixed set of sequences; and early
stopping, which ends a run when one of them no longer falls."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ptf.compute.world import World
from ptf.data.document import PackUnit
from ptf.errors import UserError
from ptf.model.model import Model
from ptf.recipes.protocol import Recipe
from ptf.train.batch_sharding import deal
from ptf.train.trainer import add_metrics, reduced
from ptf.workspace import progress


@torch.no_grad()
def held_out_metrics(
    model: Model,
    recipe: Recipe,
    sets: Mapping[str, Sequence[Sequence[PackUnit]]],
    world: World,
    micro_batch_sequences: int,
    seq_len: int,
    frozen_models: Mapping[str, Model],
) -> dict[str, float]:
    """Return the means of the recipe's metrics over each named set of packed sequences, as `loss/NAME` and so on.

    A mean is a sum divided by the recipe's denominator, for example the number of trained tokens; of a metric whose
    name ends with `_max`, the largest value of the set is returned. Raises UserError for a set whose denominator is 0.
    """
    results: dict[str, float] = {}
    for name, sequences in sets.items():
        denominator, totals = torch.zeros((), dtype=torch.float64), dict[str, torch.Tensor]()
        for batch in progress.counted(deal(sequences, world, micro_batch_sequences, seq_len), name, "batches"):
            batch = batch.to(world.device)
            _, metrics = recipe.loss(model, batch, frozen_models)
            denominator += recipe.denominator(batch).cpu()
            # without metrics of one source: a held-out set is one source
            add_metrics(totals, {metric: value for metric, value in metrics.items() if "/" not in metric})
        if not (count := float(world.sum(denominator))):
            raise UserError(
                f"data.validation.{name} has no token to measure a loss on; give it rows that are trained on"
            )
        results |= {f"{metric}/{name}": value for metric, value in reduced(totals, count, world).items()}
    return results


class EarlyStopping:
    """Early stopping by one metric; rows of metrics without it are ignored."""

    def __init__(self, metric: str, patience: int) -> None:
        self.metric = metric
        self.patience = patience
        self._best = float("inf")
        self._since = 0

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric has been measured `patience` times without a new lowest value."""
        if self.metric not in metrics:
            return False
        if metrics[self.metric] < self._best:
            self._best, self._since = metrics[self.metric], 0
        else:
            self._since += 1
        return self._since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the number of measurements since."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best, self._since = float(state["best"]), int(state["since"])


FEW_SEQUENCES = 64  # below this number of packed sequences, each document becomes a sequence of its own


@torch.no_grad()
def held_out_sequence_losses(
    model: Model,
    recipe: Recipe,
    sequences: Sequence[Sequence[PackUnit]],
    world: World,
    seq_len: int,
    frozen_models: Mapping[str, Model],
) -> np.ndarray:
    """Return the loss and the denominator of each packed sequence that has one, on every rank: [sequences, 2].

    The order depends on the sequences and on the number of ranks.
    """
    if len(sequences) < FEW_SEQUENCES:
        sequences = [[unit] for sequence in sequences for unit in sequence]
    own = []
    for batch in progress.counted(deal(sequences, world, 1, seq_len), "losses for the gate", "sequences"):
        batch = batch.to(world.device)
        _, metrics = recipe.loss(model, batch, frozen_models)
        own.append(
            [float(metrics["divergence" if "divergence" in metrics else "loss"]), float(recipe.denominator(batch))]
        )
    sequences_of_all = np.concatenate([np.array(values) for values in world.gather_data(own)])
    return sequences_of_all[sequences_of_all[:, 1] > 0]
