"""`train.optimizer: adamw_8bit`: AdamW's update with moments in 8 bits, and the same bits after a resume."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from ptf.compute import checkpoint as checkpoints
from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.errors import UserError
from ptf.model.bitsandbytes_functions import bitsandbytes_functions
from ptf.recipes.sft.recipe import SFT
from ptf.train import optimizer_8bit
from ptf.train.optimizer_8bit import QuantisedMoments, is_quantised, moment_bytes
from ptf.train.trainer import Trainer, load_model
from tests.model.ranks import two_ranks, world_of
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, checkpoint, packed
from tests.train.test_loop import resumed_alike, same, train, weights

CONFIG = TrainConfig(steps=4, lr=1e-2, weight_decay=0.1, precision="fp32", optimizer="adamw_8bit")
BATCHES = [packed([[9, 14], [20, 3, 1]], 30, seed=n) for n in range(4)]


def stepped(parameter: nn.Parameter, gradients: list[torch.Tensor], optimizer: Any) -> torch.Tensor:
    """The parameter after a step with each gradient."""
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def ours(parameter: nn.Parameter, config: TrainConfig = CONFIG) -> Any:
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas, "eps": config.eps}
    optimizer = torch.optim.AdamW([parameter], **options, fused=True)
    return QuantisedMoments(optimizer, 1) if config.optimizer == "adamw_8bit" else optimizer


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(32, 256), (8, 768), (4, 16, 256)]), st.floats(1e-6, 10.0), st.integers(0, 99))
def test_an_update_is_that_of_bitsandbytes(shape: tuple[int, ...], size: float, seed: int) -> None:
    """Whose AdamW has the same blocks of 256 values and the same 256 numbers; fp32 AdamW is farther away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_8bit, "BLOCK", 256)
        compare(shape, size, seed)


def compare(shape: tuple[int, ...], size: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    start, *gradients = (size * torch.randn(shape, generator=rng) for _ in range(5))
    theirs = nn.Parameter(start.clone())
    reference = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-2, betas=CONFIG.betas, weight_decay=0.1)
    mine, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a, b = stepped(mine, gradients, ours(mine)), stepped(theirs, gradients, reference)
    c = stepped(plain, gradients, ours(plain, CONFIG.model_copy(update={"optimizer": "adamw"})))
    # where a moment lies between two of the 256 numbers, rounding may choose either
    near = ((a - b).abs() <= 1e-5 * (1 + b.abs())).float().mean()
    assert near > 0.97, near
    assert ((a - c).abs() <= 1e-5 * (1 + c.abs())).float().mean() < near - 0.1, "negative control: moments in fp32"
    assert (a - c).abs().mean() < 2e-3  # of 4 steps of 1e-2


def test_the_first_update_has_the_bits_of_adamw() -> None:
    """It is made with the moments before they are rounded."""
    start, gradient = torch.randn(2, 32, 256).unbind()
    mine, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    stepped(mine, [gradient], ours(mine))
    stepped(plain, [gradient], ours(plain, CONFIG.model_copy(update={"optimizer": "adamw"})))
    assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    ("shape", "in_8_bits"),
    [((64, 512), True), ((8, 896), True), ((64, 2880), True), ((4096,), False), ((8, 256), False), ((64, 1000), False)],
)
def test_which_moments_are_in_8_bits_and_how_many_bytes_they_take(shape: tuple[int, ...], in_8_bits: bool) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = ours(parameter)
    stepped(parameter, [torch.randn(shape)], optimizer)
    state: dict[str, torch.Tensor] = {k: v for k, v in optimizer.optimizer.state[parameter].items() if k != "step"}
    assert is_quantised(parameter) == in_8_bits
    assert moment_bytes(parameter) == sum(value.nbytes for value in state.values())
    assert (torch.uint8 in {value.dtype for value in state.values()}) == in_8_bits
    if in_8_bits:
        assert state["exp_avg_scales"].shape == (*shape[:-1], shape[-1] // 64)


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The state of the optimizer by name, whole."""
    with trainer.whole_optimizer():
        states = checkpoints.tensors_of(trainer.model, trainer.optimizer)["optimizer"]["state"]
    return {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, state in states.items()
        for key, value in state.items()
    }


def trained(directory: Path, world: World, steps: range, resumed: str | None = None) -> Trainer:
    model = load_model(directory, world, ModelConfig(path=str(directory)), seed=0, precision="fp32")
    trainer = Trainer(model, world, CONFIG)
    if resumed:
        with trainer.whole_optimizer():
            checkpoints.load_tensors(resumed, model, trainer.optimizer, world)
    for step in steps:
        trainer.step([BATCHES[step]], of_keys(SFT), step)
    return trainer


def resumed_from(directory: str, stored: str, world: World) -> dict[str, torch.Tensor]:
    return tensors(trained(Path(directory), world, range(0), stored))


def on_two(directory: str, stored: str) -> dict[str, torch.Tensor]:
    return resumed_from(directory, stored, world_of(MeshSizes(shard=2)))


def test_a_checkpoint_of_one_rank_has_the_same_codes_on_two(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m", hidden_size=64, intermediate_size=128)
    trainer = trained(directory, World(), range(2))
    before, stored = tensors(trainer), str(tmp_path / "stored")
    assert any(name.endswith("exp_avg_sq_codes") and value.dtype == torch.uint8 for name, value in before.items())
    with trainer.whole_optimizer():
        checkpoints.write(stored, checkpoints.tensors_of(trainer.model, trainer.optimizer), {}, World())
    on_one = resumed_from(str(directory), stored, World())
    for found in (on_one, *two_ranks(partial(on_two, str(directory), stored), tmp_path)):
        assert found.keys() == before.keys()
        assert {name: value.dtype for name, value in found.items()} == {n: value.dtype for n, value in before.items()}
        assert all(torch.equal(found[name], before[name]) for name in before)


def test_a_checkpoint_whose_moments_are_stored_otherwise_is_refused(tmp_path: Path) -> None:
    """As with another mesh, where other moments are in 8 bits."""
    directory, stored = checkpoint(tmp_path / "m", hidden_size=64, intermediate_size=128), str(tmp_path / "stored")
    model = load_model(directory, World(), ModelConfig(path=str(directory)), seed=0, precision="fp32")
    trainer = Trainer(model, World(), CONFIG.model_copy(update={"optimizer": "adamw"}))
    trainer.step([BATCHES[0]], of_keys(SFT), 0)
    checkpoints.write(stored, checkpoints.tensors_of(model, trainer.optimizer), {}, World())
    with pytest.raises(UserError, match="do not fit the shards of this run"):
        trained(directory, World(), range(0), stored)


@pytest.mark.long
def test_a_run_stops_and_resumes_with_the_same_bits(tmp_path, monkeypatch) -> None:
    raw = arithmetic(tmp_path)
    raw["train"] = {**raw["train"], "validate_every": 0, "optimizer": "adamw_8bit"}

    whole, _ = resumed_alike(raw, monkeypatch, 7)
    assert not same(weights(whole), weights(train(raw, "fp32", train__optimizer="adamw"))), "negative control"


def test_without_bitsandbytes_it_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, 64))])
    QuantisedMoments(optimizer)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    bitsandbytes_functions.cache_clear()
    with pytest.raises(UserError, match=r"train\.optimizer: adamw_8bit needs bitsandbytes"):
        QuantisedMoments(optimizer)
