"""Several passes a step on ranks that share a model: what is held between them, what a rank does not use, and what a
pass that fails leaves behind."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes.protocol import Metrics
from ptf.recipes.sft.config import SFTConfig
from ptf.recipes.sft.recipe import SFT
from ptf.train.trainer import Trainer, load_model
from tests.model.ranks import two_ranks, world_of
from tests.recipes.of_keys import of_keys
from tests.tiny import checkpoint, packed, sample

MODEL = "PTF_TEST_MODEL"  # the environment says to the ranks where the model is
MESHES = {"sharded": 1, "replicated": 2}  # how many replicas two ranks are


def micro(rank: int) -> list[Batch]:
    """Three sequences of each rank."""
    return [packed([[12, 20], [9]][: 1 + (i == 1)], 32, seed=10 * rank + i) for i in range(3)]


def whole_gradient_elements(model: Decoder) -> int:
    """Elements of gradients that are held for whole parameters, not for the shard of this rank."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    params = [param for group in groups for param in group.fsdp_params]
    held = [param.unsharded_accumulated_grad for param in params]
    held += [param._unsharded_param.grad for param in params if hasattr(param, "_unsharded_param")]
    return sum(grad.numel() for grad in held if grad is not None)


@dataclass(frozen=True)
class Watched(SFT):
    """SFT that does what it is told before some of its passes."""

    before: Any = None  # called with the model before each pass

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        with self.before(model) or contextlib.nullcontext():
            return super().loss(model, batch, frozen_models)


@contextlib.contextmanager
def last_layer_plain(model: Decoder) -> Iterator[None]:
    """Inside it, the last layer is computed without its adapters."""
    adapted = [module for module in model.layers[-1].modules() if getattr(module, "adapted", False)]
    for module in adapted:
        module.adapted = False
    yield
    for module in adapted:
        module.adapted = True


def loaded(world: World, lora: bool = False) -> tuple[Decoder, Trainer]:
    spec = ModelConfig(path="-", lora=LoraConfig(rank=4) if lora else None)
    model = load_model(Path(os.environ[MODEL]), world, spec, seed=0, precision="fp32")
    return model, Trainer(model, world, TrainConfig(steps=1, lr=1e-3))


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def worlds() -> dict[str, World]:
    return {name: world_of(MeshSizes(replicate=n, shard=2 // n)) for name, n in MESHES.items()}


def held_and_gradients() -> dict[str, tuple[list[int], dict[str, Tensor]]]:
    """By mesh: what is held before each pass, and the gradient after all."""
    found = {}
    for name, world in worlds().items():
        model, trainer = loaded(world)
        held: list[int] = []
        recipe = Watched(SFTConfig(), before=lambda model, held=held: held.append(whole_gradient_elements(model)))
        trainer.forward_backward(micro(world.rank), recipe, ())
        found[name] = held, gradients(model)
    return found


def after_a_failure() -> dict[str, dict[str, Tensor]]:
    """By mesh: the gradient of a step after one whose last pass failed."""
    found = {}
    for name, world in worlds().items():
        model, trainer = loaded(world)
        calls = iter(range(100))

        def fails(_model: Decoder, calls=calls) -> None:
            if next(calls) == 2:
                raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            trainer.step(micro(world.rank), Watched(SFTConfig(), before=fails), 0)
        trainer.forward_backward(micro(world.rank), of_keys(SFT), ())
        found[name] = gradients(model)
    return found


def used_on_one_rank() -> dict[str, dict[str, Tensor]]:
    """By mesh: the gradient where the second rank leaves adapters out in its last pass and trains nothing in its
    first."""
    found = {}
    for name, world in worlds().items():
        model, trainer = loaded(world, lora=True)
        calls = iter(range(100))

        def without(model: Decoder, world=world, calls=calls) -> Any:
            return last_layer_plain(model) if next(calls) == 2 and world.rank == 1 else None

        batches = micro(world.rank)
        if world.rank == 1:
            untrained = sample(9, 1)
            batches[0] = Batch.of([[(Document(untrained.tokens, untrained.loss_weights * 0, "a"),)]], 32)
        trainer.forward_backward(batches, Watched(SFTConfig(), before=without), ())
        found[name] = gradients(model)
    return found


def on_rank() -> tuple[Any, Any, Any]:
    return held_and_gradients(), after_a_failure(), used_on_one_rank()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Iterator[dict[str, list[Any]]]:
    """What each of two ranks found, by the name of the function."""
    directory = tmp_path_factory.mktemp("accumulation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL, str(checkpoint(directory / "model")))
        ranks = two_ranks(on_rank, directory)
        yield dict(zip(("held", "failed", "unused"), zip(*ranks, strict=True), strict=True))


def alone(batches: list[Batch], lora: bool = False, without: frozenset[int] = frozenset()) -> dict[str, Tensor]:
    """The gradient of one process over the batches of both ranks; `without`: passes with the last layer plain."""
    model, trainer = loaded(World(), lora)
    calls = iter(range(100))
    trainer.forward_backward(
        batches, Watched(SFTConfig(), before=lambda m: last_layer_plain(m) if next(calls) in without else None), ()
    )
    return gradients(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.long
def test_no_whole_gradient_is_held_between_passes(found):
    expected = alone(micro(0) + micro(1))
    for by_mesh in found["held"]:
        for held, gradient in by_mesh.values():
            assert held == [0, 0, 0]
            assert_equal(gradient, expected)


@pytest.mark.long
def test_a_pass_that_fails_leaves_nothing_for_the_next_step(found):
    expected = alone(micro(0) + micro(1))
    for by_mesh in found["failed"]:
        for gradient in by_mesh.values():
            assert_equal(gradient, expected)


def test_what_one_rank_does_not_use_is_still_reduced(found):
    """Without zeros for it, the other rank waits for a collective that this one leaves out."""
    expected = alone([*micro(0), *micro(1)[1:]], lora=True, without=frozenset({4}))
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for by_mesh in found["unused"]:
        for gradient in by_mesh.values():
            assert_equal(gradient, expected)


def test_weight_decay_reaches_what_was_not_used(found):
    """Zero gradients stand for missing ones, on one rank as on several."""
    assert found["unused"]
    model, trainer = loaded(World(), lora=True)
    trainer.forward_backward(micro(0), Watched(SFTConfig(), before=last_layer_plain), ())
    last = [p.grad for p in model.layers[-1].parameters() if p.requires_grad]
    assert last
    assert all(grad is not None and not torch.any(grad) for grad in last)


class Averaged(SFT):
    """A recipe with a metric that has the name of a largest value, but would be averaged."""

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(model, batch, frozen_models)
        return loss, {**metrics, "max_loss": loss.detach()}


def test_a_largest_value_that_would_be_averaged_is_refused(found):
    assert found["held"]
    model, trainer = loaded(World())
    with pytest.raises(UserError, match="call it loss_max"):
        trainer.step(micro(0), of_keys(Averaged), 0)
    assert all(parameter.grad is None for parameter in model.parameters())
