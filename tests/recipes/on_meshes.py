"""What a recipe finds on ranks that divide sequences, beside one rank: loss, metrics, denominator and gradients; and a
run that goes on from a checkpoint on another mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptf.compute import checkpoint
from ptf.compute.world import World, alone
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.recipes.dpo.recipe import DPO
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.kd.config import TeacherConfig
from ptf.recipes.kd.recipe import KD
from ptf.recipes.protocol import Recipe
from ptf.recipes.rm.recipe import RM
from ptf.recipes.sft.recipe import SFT
from ptf.train.batch_sharding import deal
from ptf.train.trainer import Trainer, load_model
from tests.model.parallel import largest
from tests.model.ranks import world_of
from tests.recipes.of_keys import of_keys
from tests.tiny import sample

WIDTH, LENGTHS = 160, (37, 18, 29, 9, 41, 22, 33, 12)
COLUMNS = ("advantages", "rollout_logprobs", "old_logprobs", "episode_tokens")
RECIPES: dict[str, Recipe] = {
    "SFT": of_keys(SFT),
    "DPO": of_keys(DPO),
    "IPO": of_keys(DPO, loss_type="ipo", length_normalised=True),
    "GRPO, ratio 1": of_keys(GRPO),
    "GRPO, clipped": of_keys(GRPO, update_epochs=2),
    "GSPO": of_keys(GRPO, update_epochs=2, importance_sampling_level="sequence"),
    "RM": of_keys(RM),
    "KD": of_keys(KD, teachers={"teacher": TeacherConfig(path="-")}),
}


def units(recipe: Recipe) -> list[PackUnit]:
    """Documents of a recipe, in pairs where it compares two."""
    found = [sample(n, i) for i, n in enumerate(LENGTHS)]
    if isinstance(recipe, GRPO):
        names = [name for name in COLUMNS if name != "old_logprobs" or recipe.needs_old_logprobs]
        found = [_sampled(document, i, names) for i, document in enumerate(found)]
    paired = isinstance(recipe, DPO | RM)
    return [tuple(found[i : i + 2]) for i in range(0, len(found), 2)] if paired else [(each,) for each in found]


def _sampled(document: Document, seed: int, names: Sequence[str]) -> Document:
    rng, trained = np.random.default_rng(seed), document.loss_weights != 0
    columns = {name: (0.5 * rng.normal(size=len(document)) * trained).astype(np.float32) for name in names}
    columns |= {name: columns[name] - trained.astype(np.float32) for name in names if "logprobs" in name}
    columns["episode_tokens"] = np.zeros(len(document), np.float32)
    return Document(document.tokens, document.loss_weights, document.source, columns)


@dataclass(frozen=True)
class Pass:
    """What `Trainer.forward_backward` finds."""

    means: Mapping[str, float]
    denominator: float
    gradients: Mapping[str, torch.Tensor]


def whole(model: Any) -> dict[str, torch.Tensor]:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()}


def once(directory: str, recipe: Recipe, world: World, exact: bool = False) -> Pass:
    """Compute the gradients of one global batch; `exact`: in fp64."""

    def one(head: Any = "lm") -> Any:
        spec = ModelConfig(path=directory)
        made = load_model(Path(directory), world, spec, seed=0, precision="fp32", head=head)
        return made.double() if exact else made

    model, frozen = one(recipe.head), {role: one().requires_grad_(False) for role in recipe.frozen_models}
    with torch.no_grad():
        for parameter in (p for each in frozen.values() for p in each.parameters() if p.is_floating_point()):
            parameter.mul_(1.5)
    trainer = Trainer(model, world, TrainConfig(steps=1, lr=1e-3), frozen)
    batches = deal(pack_all(units(recipe), WIDTH), world, 1, WIDTH)
    means, denominator = trainer.forward_backward(batches, recipe, ())
    return Pass(means, denominator, whole(model))


def recipes_on_rank(directory: str, sizes: MeshSizes) -> dict[str, tuple[float, float, bool]]:
    """What each rank calls: for each recipe the largest relative differences of a metric (the loss is one) and of the
    gradients from one rank's, and whether the denominators are the same. A margin is the difference of two log-probs,
    so its own difference is relative to theirs. Tensor parallelism rounds sums of its own, which a mean score near 0
    shows in fp32: its meshes are computed in fp64."""
    world, found = world_of(sizes), {}
    for name, recipe in RECIPES.items():
        mine, theirs = (once(directory, recipe, each, sizes.tensor > 1) for each in (world, alone(world)))
        assert mine.means.keys() == theirs.means.keys()
        scales = {k: max(abs(v), 1.0 if k == "margin" else 1e-2) for k, v in theirs.means.items()}
        means = largest(abs(mine.means[k] - v) / scales[k] for k, v in theirs.means.items())
        found[name] = means, norm_of_change(theirs.gradients, mine.gradients), mine.denominator == theirs.denominator
    wrong = replace(world, meshes=replace(world.meshes, data=None))  # it sums over ranks that see the same data
    mine, theirs = (once(directory, RECIPES["SFT"], each) for each in (wrong, alone(world)))
    assert mine.denominator == world.size * theirs.denominator, "negative control"
    return found


def norm_of_change(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm of `a`."""
    assert a.keys() == b.keys()

    def norm(tensors: Sequence[torch.Tensor]) -> float:
        return float(torch.cat([t.double().flatten() for t in tensors]).norm())

    return norm([a[n] - b[n] for n in a]) / norm(list(a.values()))


def resumed_on_rank(directory: str, meshes: Sequence[MeshSizes], scratch: str) -> dict[tuple[str, str], float]:
    """What each rank calls: train two steps on each mesh, store, and go on for two from each checkpoint on each mesh.
    Return for every pair the largest relative difference, of loss and gradients, of the fourth step from one rank's:
    it has the optimizer's averages in it. Without them another step is found."""
    recipe = RECIPES["SFT"]

    def trainer(world: World) -> Trainer:
        spec = ModelConfig(path=directory)
        model = load_model(Path(directory), world, spec, seed=0, precision="fp32")
        return Trainer(model, world, TrainConfig(steps=8, lr=2e-5), {})

    def step(of: Trainer, number: int) -> tuple[float, dict[str, torch.Tensor]]:
        documents = [(sample(n, 100 * number + i),) for i, n in enumerate(LENGTHS)]
        batches = deal(pack_all([*documents, *documents], 64), of.world, 1, 64)
        means, _ = of.forward_backward(batches, recipe, ())
        gradients = whole(of.model)
        of.update(means["loss"], number)
        return means["loss"], gradients

    def last(of: Trainer, first: int) -> tuple[float, dict[str, torch.Tensor]]:
        return [step(of, number) for number in range(first, 4)][-1]

    worlds = {str(sizes): world_of(sizes) for sizes in meshes}
    wanted, found = last(trainer(alone(next(iter(worlds.values())))), 0), {}
    for name, world in worlds.items():
        of = trainer(world)
        for number in range(2):
            step(of, number)
        checkpoint.write(f"{scratch}/{name}", checkpoint.tensors_of(of.model, of.optimizer), {}, world)
    for before in worlds:
        for after, world in worlds.items():
            of = trainer(world)
            checkpoint.load_tensors(f"{scratch}/{before}", of.model, of.optimizer, world)
            loss, gradients = last(of, 2)
            apart = abs(loss - wanted[0]) / abs(wanted[0])
            found[before, after] = largest((apart, norm_of_change(wanted[1], gradients)))
    without = trainer(world)
    checkpoint.load_tensors(f"{scratch}/{before}", without.model, without.optimizer, world)
    without.optimizer.state.clear()
    assert norm_of_change(wanted[1], last(without, 2)[1]) > 1e-5, "negative control"
    return found
