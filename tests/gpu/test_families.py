"""Losses and gradients of small models of every kind, sharded over a group of one rank in bf16, against one process of
the CPU in fp32; and the offloading of what such a group holds."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptf.compute.offload import OffloadedTensors
from ptf.compute.world import World, joined
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.model.chunked import cross_entropy
from ptf.model.sharding import PLAN
from ptf.model.tensor_parallel import cut
from ptf.recipes.sft.recipe import SFT
from ptf.train.trainer import Trainer, load_model
from tests.model.parallel import checkpoint
from tests.recipes.of_keys import of_keys
from tests.tiny import packed

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "qwen3_5_text", "deepseek_v3")
WIDER = {"deepseek_v3": {"v_head_dim": 16}}  # FlexAttention has no kernel for narrower heads on a GPU
ROWS = [[100, 28, 1, 127], [256], [17, 200]]
BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}  # of the loss, relative, and of the gradient's norm
# experts in bf16: rounding sends a token to another expert
ROUTED = {"bf16": (5e-2, 5e-1), "fp32": BOUNDS["fp32"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {
        family: checkpoint(tmp_path_factory.mktemp("models") / family, family, **WIDER.get(family, {}))
        for family in FAMILIES
    }


def found(directory: str, world: World, precision: str, recomputed="none", tensor_group=False):
    """The loss and the whole gradient of a batch."""
    model = load_model(
        Path(directory), world, ModelConfig(path=directory), seed=0, precision=precision, recomputed=recomputed
    )
    if tensor_group and world.meshes.dense is not None:
        cut(model, world.meshes.dense["tensor"], PLAN)
    batch = packed(ROWS, 256).to(world.device)
    head_fn = partial(
        cross_entropy, targets=batch.targets, weights=batch.loss_weights, selected=batch.trained_positions
    )
    loss = model(batch.tokens, batch.positions, batch.segments, head_fn)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: (g.full_tensor() if isinstance(g, DTensor) else g).float().cpu() for n, g in grads.items()}
    return float(loss.detach()), whole


def assert_close(one, other, bounds) -> None:
    assert one[0] == pytest.approx(other[0], rel=bounds[0])
    assert one[1].keys() == other[1].keys()
    difference = torch.cat([(one[1][n] - g).flatten() for n, g in other[1].items()]).norm()
    assert difference <= bounds[1] * torch.cat([g.flatten() for g in other[1].values()]).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_model_computes_what_the_cpu_does(models, device, family, precision):
    expected = found(models[family], World(), "fp32")
    with joined(device, 60) as world:
        one = found(models[family], world, precision)
    assert_close(one, expected, (ROUTED if family in ("qwen3_moe", "gpt_oss", "deepseek_v3") else BOUNDS)[precision])


@pytest.mark.parametrize("recomputed", ["block", "selective"])
def test_recomputation_changes_nothing(models, device, recomputed):
    with joined(device, 60) as world:
        plain, again = (found(models["gemma3_text"], world, "bf16", how) for how in ("none", recomputed))
    assert_close(again, plain, (1e-6, 1e-3))


def test_a_tensor_group_of_one_rank_changes_nothing(models, device):
    with joined(device, 60) as world:
        alone, group = (found(models["qwen3"], world, "fp32", tensor_group=shardings) for shardings in (False, True))
    assert_close(group, alone, (1e-6, 1e-5))


def test_what_a_sharded_model_holds_is_offloaded_and_restored_to_the_bit(models, device):
    with joined(device, 60) as world:
        model = load_model(Path(models["qwen3"]), world, ModelConfig(path=models["qwen3"]), seed=0, precision="bf16")
        trainer = Trainer(model, world, TrainConfig(steps=3, lr=1e-3))
        trainer.step([packed(ROWS, 256)], of_keys(SFT), 0)
        held = [*model.parameters()]
        held += [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
        before = [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in held]
        offloaded = OffloadedTensors(None)
        offloaded.offload(held)
        assert all((t.to_local() if isinstance(t, DTensor) else t).untyped_storage().nbytes() == 0 for t in held)
        offloaded.restore()
        after = [t.to_local() if isinstance(t, DTensor) else t for t in held]
        assert all(map(torch.equal, before, after))
        trainer.step([packed(ROWS, 256)], of_keys(SFT), 1)


def test_an_optimizer_in_host_memory_makes_the_same_steps(models, device):
    with joined(device, 60.0) as world:
        ended = []
        for optimizer in ("adamw", "adamw_offload"):
            spec = ModelConfig(path=models["qwen3"])
            model = load_model(Path(spec.path), world, spec, seed=0, precision="bf16")
            trainer = Trainer(model, world, TrainConfig(steps=3, lr=1e-3, optimizer=optimizer))
            for step in range(3):
                trainer.step([packed(ROWS, 256, seed=step)], of_keys(SFT), step)
            ended.append([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(*ended, strict=True))
