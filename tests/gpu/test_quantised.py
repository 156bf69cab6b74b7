"""Weights in four bits, and AdamW's moments in eight, on a GPU beside the CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptf.compute.world import World, joined
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.model import mxfp4, nf4
from ptf.recipes.sft.recipe import SFT
from ptf.train.optimizer_8bit import QuantisedMoments
from ptf.train.trainer import Trainer, load_model
from tests.gpu.test_families import BOUNDS
from tests.model.published import SIZES, mxfp4_checkpoint
from tests.recipes.of_keys import of_keys
from tests.tiny import checkpoint, packed

VOCABULARY = SIZES["vocab_size"]  # of the smaller of the two models
WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}


def needs_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_values_of_the_cpu(device: str, dtype: torch.dtype) -> None:
    needs_bitsandbytes()
    weight = drawn(3, 64, 256)
    codes, scales = nf4.quantise(weight)
    there, their_scales = nf4.quantise(weight.to(device))
    assert torch.equal(their_scales.cpu(), scales)
    assert (there.cpu() != codes).float().mean() < 1e-3  # a value in the middle between two of the sixteen
    values = nf4.dequantise(codes.to(device), scales.to(device), dtype)
    assert torch.equal(values.cpu(), nf4.dequantise(codes, scales, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_has_the_values_of_the_cpu(device: str, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, (5, 64, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, 64, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    weight = mxfp4.dequantise(codes.to(device), scales.to(device), dtype)
    assert torch.equal(weight.cpu(), mxfp4.dequantise(codes, scales, dtype))
    again = mxfp4.quantise(weight)
    assert torch.equal(mxfp4.dequantise(*again, dtype), weight)


Named = list[tuple[str, torch.Tensor]]


def trained(directory: Path, world: World, precision: str, spec: dict, **train: object) -> Named:
    """Three steps; what trains, whole, in fp32 on the CPU."""
    given = ModelConfig(path=str(directory), **spec)
    model = load_model(directory, world, given, seed=0, precision=precision)
    trainer = Trainer(model, world, TrainConfig(steps=3, lr=1e-3, **train))
    for step in range(3):
        batch = packed([[100, 28, 1, 127], [256]], 256, seed=step)
        batch = dataclasses.replace(batch, tokens=batch.tokens % VOCABULARY, targets=batch.targets % VOCABULARY)
        trainer.step([batch], of_keys(SFT), step)
    weights = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [(n, (p.full_tensor() if isinstance(p, DTensor) else p).detach().float().cpu()) for n, p in weights]


def distance(one: Named, other: Named) -> float:
    """How far what was trained is apart, relative to its norm."""
    assert [name for name, _ in one] == [name for name, _ in other]
    a, b = (torch.cat([value.flatten() for _, value in each]) for each in (one, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("form", ["nf4", "mxfp4"])
def test_adapters_on_weights_of_four_bits_train_as_on_the_cpu(tmp_path: Path, device: str, form: str) -> None:
    if form == "nf4":
        needs_bitsandbytes()
        directory = checkpoint(tmp_path / "m", **WIDTHS)
    else:
        mxfp4_checkpoint(directory := tmp_path / "m")
    spec = {"lora": {"rank": 4, "alpha": 8, "targets": ["*"]}, "quantization": form}
    expected = trained(directory, World(), "fp32", spec)
    with joined(device, 60) as world:
        found = trained(directory, world, "bf16", spec)
    assert distance(found, expected) <= (5e-2 if form == "nf4" else BOUNDS["bf16"][1])


def stepped(device: str, eight_bits: bool) -> torch.Tensor:
    """A matrix after five steps along gradients that are the same everywhere."""
    matrix = torch.nn.Parameter(drawn(64, 128).to(device))
    optimizer = torch.optim.AdamW([matrix], lr=1e-2)
    step = QuantisedMoments(optimizer).step if eight_bits else optimizer.step
    for seed in range(5):
        matrix.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(device)
        step()
    return matrix.detach().cpu()


def test_moments_in_eight_bits_make_the_steps_of_the_cpu(device: str) -> None:
    needs_bitsandbytes()
    expected, found, plain = stepped("cpu", True), stepped(device, True), stepped(device, False)
    away = (plain - expected).abs().mean()  # what eight bits change
    assert away > 0
    assert (found - expected).abs().mean() <= 0.1 * away
