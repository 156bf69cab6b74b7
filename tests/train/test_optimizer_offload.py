"""`train.optimizer: adamw_offload`: the same bits, with the averages of one bucket at a time on the device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.model import bridge
from ptf.recipes.sft.recipe import SFT
from ptf.train.optimizer_offload import OffloadedMoments
from ptf.train.trainer import Trainer, load_model
from tests.model.ranks import two_ranks, world_of
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, checkpoint, packed
from tests.train.test_loop import facts, same, stopped, train, weights

BATCHES = [packed([[9, 14], [20, 3, 1]], 30, seed=n) for n in range(4)]
LIMIT = 40_000  # bytes: several buckets, and one parameter that is larger


def resident(optimizer: torch.optim.Optimizer) -> list[int]:
    """The bytes of each average, as it lies on the device now."""
    states: Any = optimizer.state.values()
    tensors = [v.to_local() if hasattr(v, "to_local") else v for s in states for k, v in s.items() if k != "step"]
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def trained(model: Any, world: World, limit: int | None, seen: list[int]) -> Trainer:
    """Train a few steps; with `limit` the averages are offloaded, and `seen` gets the bytes at each bucket."""
    config = TrainConfig(steps=4, lr=1e-2, weight_decay=0.1, lr_multipliers={"embed": 2.0}, precision="fp32")
    trainer = Trainer(model, world, config)
    if limit is not None:
        trainer.optimizer_stepper = OffloadedMoments(trainer.optimizer, limit)
        trainer.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(sum(resident(optimizer))))
    for step, batch in enumerate(BATCHES):
        trainer.step([batch], of_keys(SFT), step)
        if limit is not None:
            assert not any(resident(trainer.optimizer))
    return trainer


@pytest.mark.parametrize("limit", [1, LIMIT, 1 << 40])
def test_steps_have_the_bits_of_those_without(tmp_path, limit: int) -> None:
    directory, seen = checkpoint(tmp_path / "m"), []
    plain = trained(bridge.load(directory), World(), None, seen)
    mine = trained(bridge.load(directory), World(), limit, seen)
    for a, b in zip(plain.model.parameters(), mine.model.parameters(), strict=True):
        assert torch.equal(a, b)
    averages = resident(plain.optimizer)
    with mine.whole_optimizer():
        assert resident(mine.optimizer) == averages
        for a, b in zip(plain.optimizer.state.values(), mine.optimizer.state.values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(resident(mine.optimizer))
    assert max(seen) <= max(limit, 2 * max(averages))
    assert max(seen) < sum(averages)  # of three groups, never all


def sharded(directory: str) -> bool:
    world = world_of(MeshSizes(shard=2))
    spec = ModelConfig(path=directory)
    models = [load_model(Path(directory), world, spec, seed=0, precision="fp32") for _ in range(2)]
    plain, mine = (trained(m, world, limit, []) for m, limit in zip(models, (None, LIMIT), strict=True))
    pairs = zip(plain.model.parameters(), mine.model.parameters(), strict=True)
    return all(isinstance(a, DTensor) and torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_shards_of_two_ranks_have_the_same_bits(tmp_path) -> None:
    assert two_ranks(partial(sharded, str(checkpoint(tmp_path / "m"))), tmp_path) == [True, True]


@pytest.mark.long
def test_a_run_stops_and_resumes_with_the_same_bits(tmp_path, monkeypatch) -> None:
    raw = arithmetic(tmp_path)
    raw["train"] = {**raw["train"], "validate_every": 0}

    whole = train(raw, "whole")
    stopped(monkeypatch, 7, lambda: train(raw, "stopped"))
    resumed = train(raw, "stopped", train__optimizer="adamw_offload")  # a resume may change to it
    assert same(weights(whole), weights(resumed))
    assert facts(whole) == facts(resumed)
