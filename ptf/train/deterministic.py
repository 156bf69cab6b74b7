"""The deterministic mode: a step's result is the same to the bit however its sequences are split into passes and
distributed over ranks.

Floating-point addition depends on its order, so the order is fixed. Each sequence is trained by itself, from gradients
of zero; the sequences' gradients and metrics are then added one after the other by the sequence's number in the global
step, on every rank alike. That needs the whole model on every rank and a gradient for each sequence, so it is for small
models.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.errors import UserError
from ptf.model.model import Model
from ptf.recipes.protocol import Recipe
from ptf.train.trainer import Means, Trainer, add_metrics, is_largest, raise_if_other_packages

MAX_GRADIENT_BYTES = 4 << 30  # of all sequences of a rank


class DeterministicTrainer(Trainer):
    """A trainer whose result does not depend on the number of ranks; the model is whole on every rank, and batches hold
    one sequence each."""

    def __init__(self, model: Model, world: World, *args: Any) -> None:
        super().__init__(model, world, *args)
        raise_if_other_packages(model.kernels, world)  # each rank loaded a model of its own
        torch.set_num_threads(1)  # the order of additions depends on the number of threads

    def forward_backward(self, micro: Sequence[Batch], recipe: Recipe, sequences: Sequence[int]) -> Means:
        """Leave the gradient of the mean loss in the parameters, summed in the order of the sequences.

        Raises UserError if the gradients of this rank's sequences need more than 4 GiB.
        """
        world, parameters = self.world, [p for p in self.model.parameters() if p.requires_grad]
        assert all(len(batch.tokens) == 1 for batch in micro), "one sequence a batch"
        size = len(micro) * sum(p.numel() * p.element_size() for p in parameters)
        if size > MAX_GRADIENT_BYTES:
            raise UserError(
                f"train.deterministic keeps a gradient for each sequence, {size / 2**30:.1f} GiB on every worker here, "
                f"and allows at most {MAX_GRADIENT_BYTES / 2**30:g}: "
                "lower train.global_batch_sequences, or turn train.deterministic off"
            )
        # for each sequence of the global step: its rank, and its index among that rank's sequences
        owners: list[tuple[int, int]] = [(0, 0)] * (len(sequences) * world.size)
        for rank, numbers in enumerate(self.world.all_gather_object(list(sequences))):
            for k, number in enumerate(numbers):
                owners[number] = rank, k
        micro = [batch.to(world.device) for batch in micro]
        denominators = self.world.all_gather_object([float(recipe.denominator(batch)) for batch in micro])
        denominator = 0.0
        for rank, k in owners:
            denominator += denominators[rank][k]
        if not denominator:
            return {}, denominator
        gradients, sequence_metrics = list[torch.Tensor](), list[dict[str, torch.Tensor]]()
        for batch in micro:
            loss, metrics = self.loss(batch, recipe)
            (loss / denominator).backward()
            gradients.append(
                torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
            )
            self.optimizer.zero_grad(set_to_none=True)
            sequence_metrics.append({name: value.detach().double() for name, value in metrics.items()})
        total, totals = torch.zeros_like(gradients[0]), dict[str, torch.Tensor]()
        values = world.all_gather_object(sequence_metrics)
        for rank, k in owners:
            gradient = gradients[k] if rank == world.rank else torch.empty_like(total)
            if world.size > 1:
                dist.broadcast(gradient, src=rank)
            total += gradient
            add_metrics(totals, values[rank][k])
        offset = 0
        for p in parameters:
            p.grad = total[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        return {n: float(v) if is_largest(n) else float(v) / denominator for n, v in totals.items()}, denominator
