"""One model, its optimizer, and one training step. SFT calls `step` in a loop; the policy role of RL calls it too."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.compute.world import World
from ptf.config.backends import BACKENDS
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.errors import UserError
from ptf.model.backends import backend_of
from ptf.model.components import abbreviated
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.kernels.fused import Setting
from ptf.model.model import Model
from ptf.model.recompute import Recompute
from ptf.model.sharding import parallelize
from ptf.recipes.protocol import Recipe
from ptf.train.components import layer_factory_of
from ptf.train.optim import Schedule, groups
from ptf.train.optimizer_8bit import QuantisedMoments
from ptf.train.optimizer_offload import OffloadedMoments
from ptf.train.trainable import freeze, frozen_dtype, hold_frozen
from ptf.workspace import progress


def built(directory: Path, spec: ModelConfig, head: Literal["lm", "scalar"], kernels: Kernels = PLAIN) -> Model:
    """Build a model without memory, with what trains in it. Raise UserError for one that cannot be trained."""
    model = backend_of(spec.backend).build(
        directory, head=head, factory=layer_factory_of(spec, adapted=True, kernels=kernels)
    )
    freeze(model, spec.trainable)
    return model


def load_model(
    directory: Path,
    world: World,
    spec: ModelConfig,
    *,
    seed: int,
    precision: str,
    head: Literal["lm", "scalar"] = "lm",
    recomputed: Recompute = "none",
    compiled: bool | Literal["auto"] = False,
    fused: Setting = (),
    frozen: bool = False,
) -> Model:
    """Build a sharded model with its weights, read from the directory or drawn from the seed.

    Parameters that the checkpoint does not have (a new scalar head, components of the user's own) are drawn from the
    seed and reported. A `frozen` model has no trained parameter, and its weights are held in the dtype of the
    computation. `compiled` and `fused` are `train.compile` and `train.fused`.
    """
    takes = BACKENDS[spec.backend].kernels
    kernels = Kernels.of(world.device, precision, compiled=takes and compiled, fused=fused if takes else ())
    raise_if_other_packages(kernels, world)
    model = built(directory, spec, head, kernels)
    if frozen:
        model.requires_grad_(False)
    # fp32 for weights that are trained or that an export must give back in fp32
    dtype = frozen_dtype(directory, precision, exported=not frozen)
    hold_frozen(model, dtype, model.stored_in_fp32(directory) if dtype != torch.float32 and not frozen else ())
    parallelize(model, world.meshes, precision, recomputed=recomputed)
    new = model.give_weights(directory, world.device, random=spec.init == "random", seed=seed)
    if world.leads and new:
        print(
            f"model: these tensors are not in {directory} and are drawn from the seed: {abbreviated(new)}", flush=True
        )
    for note in model.notes() if world.leads and not frozen else ():
        print(note, flush=True)
    return model


def raise_if_other_packages(kernels: Kernels, world: World) -> None:
    """Raise UserError if another machine computes with other packages than this rank."""
    found = kernels.packages
    if others := [each for each in world.all_gather_object(found) if each != found]:
        raise UserError(
            f"train.fused: this machine has {found or 'none'}, another one {others[0] or 'none'}; install the same on "
            "all, and use CPUs of one kind (oneDNN is for those of AMD with AVX-512)"
        )


def forget_forwards(frozen: nn.Module) -> None:
    """Discard FSDP's records of the forward passes of a frozen model.

    FSDP records each forward pass for a backward pass that a frozen model does not have, so the records would grow
    throughout the run.
    """
    if isinstance(frozen, FSDPModule):
        frozen.reset_iter_state()


def discard_gradients(model: nn.Module) -> None:
    """Discard what backward passes left: gradients, and partial sums that the replicas of HSDP have not reduced yet."""
    for parameter in model.parameters():
        parameter.grad = None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._partial_reduce_output = None


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on a device. While one batch is used on a GPU, the next one is copied there on another stream.

    The caller must keep the host's batches unchanged until the GPU has finished the work that was queued: a copy from
    pinned memory returns before it is complete.
    """
    if device.type != "cuda":
        yield from batches
        return
    copying, computing = torch.Stream(device=device), torch.accelerator.current_stream(device)

    def copied(batch: Batch) -> Batch:
        with copying:
            return batch.to(device)

    following = copied(batches[0])
    for i in range(len(batches)):
        batch = following
        computing.wait_stream(copying)
        for tensor in batch.tensors():
            tensor.record_stream(computing)  # so that its memory is not used again while it is read
        if i + 1 < len(batches):
            following = copied(batches[i + 1])
        yield batch


LARGEST = "_max"  # end of the names of metrics that are largest values, not means
Means = tuple[dict[str, float], float]  # metrics as means over all ranks, and the denominator


def is_largest(metric: str) -> bool:
    """Return whether a metric is the largest value of all batches and ranks, not a mean.

    Raises UserError for a name that begins with `max_`, which would be averaged.
    """
    if metric.startswith("max_"):
        raise UserError(
            f"the recipe reports {metric}: the name of a largest value ends with {LARGEST}; "
            f"call it {metric.removeprefix('max_')}{LARGEST}"
        )
    return metric.endswith(LARGEST)


def add_metrics(totals: dict[str, torch.Tensor], metrics: Mapping[str, torch.Tensor]) -> None:
    """Add a batch's metrics to those of earlier batches; of a largest value, keep the larger."""
    for name, value in metrics.items():
        value = value.detach().double()
        if is_largest(name):
            value = torch.where(value.isnan(), math.inf, value)  # collectives may drop a NaN from a maximum
            totals[name] = torch.maximum(totals[name], value) if name in totals else value
        else:
            totals[name] = totals[name] + value if name in totals else value


def reduced(totals: Mapping[str, torch.Tensor], denominator: float, world: World) -> dict[str, float]:
    """Return sums over all ranks divided by the denominator, and largest values; all ranks have the same names."""
    names = sorted(totals, key=is_largest)  # means, then largest values
    values, first = torch.stack([totals[name] for name in names]), sum(not is_largest(n) for n in names)
    sums, largest = world.sum_and_max(values[:first], values[first:])
    return dict(zip(names, [value / denominator for value in sums] + largest, strict=True))


class Trainer:
    """A model, its optimizer, its schedule and the frozen models that its loss uses."""

    def __init__(
        self, model: Model, world: World, config: TrainConfig, frozen_models: Mapping[str, Model] | None = None
    ) -> None:
        self.model, self.world, self.frozen_models = model, world, frozen_models or {}
        self.max_grad_norm = config.max_grad_norm
        self.schedule = Schedule.of(config, config.steps or 1)
        parameters = groups(model, config.weight_decay, config.lr_multipliers)
        # on a CPU, fused is 4.5 times as fast as foreach
        self.optimizer = torch.optim.AdamW(parameters, config.lr, config.betas, config.eps, fused=True)
        stepper = {"adamw_offload": OffloadedMoments, "adamw_8bit": QuantisedMoments}.get(config.optimizer)
        self.optimizer_stepper = stepper and stepper(self.optimizer)

    def whole_optimizer(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the optimizer's state exists and is on the device, to store or to load it."""
        return self.optimizer_stepper.whole() if self.optimizer_stepper else contextlib.nullcontext()

    def step(
        self,
        micro: Sequence[Batch],
        recipe: Recipe,
        step: int,
        sequences: Sequence[int] = (),
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step over this rank's micro-batches; every rank brings the same number.

        `step` sets the learning rate. `sequences`: the numbers of the sequences in the global step, for trainers that
        need them. `check` is called with the metrics before any weight changes; an exception that it raises ends the
        step.

        Metrics are means: sums over all micro-batches and ranks divided by the recipe's denominator (names that end
        with `_max`: the largest value of all micro-batches and ranks). If the denominator is 0, only
        `loss_denominator` (0) is returned and no weight changes. Raises FloatingPointError, before any weight changes,
        if the loss or the gradient is not finite.
        """
        phase = self.world.clock.phase
        try:
            with phase("forward_backward"):
                means, denominator = self.forward_backward(micro, recipe, sequences)
                for frozen_model in self.frozen_models.values():
                    if frozen_model is not self.model:
                        forget_forwards(frozen_model)
            if not denominator:  # all partitions have ended, so nothing is trained
                return {"loss_denominator": 0.0}
            if check:
                check(means)
            with phase("optimizer"):
                return {**means, **self.update(means["loss"], step), "loss_denominator": denominator}
        except BaseException:
            discard_gradients(self.model)
            raise

    def update(self, loss: float, step: int) -> dict[str, float]:
        """Update the weights from the accumulated gradients; return the gradient norm and the learning rate."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; the weights are as before this step"
            )
        lr = self.schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        (self.optimizer_stepper or self.optimizer).step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr}

    def forward_backward(self, micro: Sequence[Batch], recipe: Recipe, sequences: Sequence[int]) -> Means:
        """Run forward and backward over the micro-batches, which are in host memory, and leave the gradient of the mean
        loss in the parameters.

        Each pass reduces its gradients to the shards of the ranks; otherwise every rank would hold a whole gradient, in
        fp32, until the last pass. Only the sum over the replicas of HSDP is made once, in the last pass.
        """
        world = self.world
        denominator = float(
            world.sum(sum((recipe.denominator(b) for b in micro), torch.zeros((), dtype=torch.float64)))
        )
        if not denominator:
            return {}, denominator
        totals: dict[str, torch.Tensor] = {}
        numbers = progress.counted(range(len(micro)), "passes", "micro-batches")
        for i, batch in zip(numbers, on_device(micro, world.device), strict=True):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_all_reduce(i == len(micro) - 1)
            loss, metrics = self.loss(batch, recipe)
            # the denominator is of all ranks, and so is the sum of their gradients (`parallelize`)
            (loss * (1 / denominator)).backward()
            add_metrics(totals, metrics)
        # FSDP gives zeros to a parameter that this rank has not used, because others may have (`parallelize`); one
        # process does the same, so that weight decay does not depend on the number of ranks
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return reduced(totals, denominator, world), denominator

    def loss(self, batch: Batch, recipe: Recipe) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the recipe's loss summed over a batch and its metrics, with the load-balancing loss of experts."""
        loss, metrics = recipe.loss(self.model, batch, self.frozen_models)
        if (balancing := self.model.load_balancing_loss()) is not None and (moe := self.model.config.moe):
            share = balancing * recipe.denominator(batch)  # it is a mean: weighted by the denominator of its batch
            return loss + moe.router_aux_loss_coef * share, {**metrics, "load_balancing_loss": share.detach()}
        return loss, dict(metrics)
