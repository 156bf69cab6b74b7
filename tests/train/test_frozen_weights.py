"""Weights that do not train are held in bf16 under `precision: bf16`: the same bits computed, in half the memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ptf.compute.world import World, joined
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.model import bridge, model_writer
from ptf.model.lora import adapter_names, adapters, merged_weights, whole
from ptf.model.model import Model
from ptf.model.verify import packed
from ptf.train import model_source, trainer
from ptf.train.trainer import load_model
from tests.model.test_lora import checkpoint
from tests.tiny import arithmetic, configured
from tests.train.test_loop import same, stopped, train, weights
from tests.train.test_preferences import preferences

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "olmo2", "phi3")
LORA = LoraConfig(rank=4, alpha=8.0)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def world() -> Iterator[World]:
    with joined("cpu", 60) as world:
        yield world


def stored(directory: Path, model_type: str, dtype: torch.dtype) -> Path:
    checkpoint(model_type, directory)
    model = load_model(directory, World(), ModelConfig(path=str(directory)), seed=0, precision="fp32")
    configured(directory, dtype=str(dtype).removeprefix("torch."))
    (directory / "model.safetensors").unlink()  # whose dtype an export would have
    model_writer.save_hf(model.hf_tensors(), directory, directory.with_name("stored"), writes=True)
    return directory.with_name("stored")


def loaded(directory: Path, world: World, *, lora: bool = False, frozen: bool = False):
    spec = ModelConfig(path=str(directory), lora=LORA if lora else None)
    model = load_model(directory, world, spec, seed=0, precision="bf16", frozen=frozen)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p += 0.02
    return model


@torch.no_grad()
def logits(model) -> Tensor:
    positions, segments = packed()
    tokens = torch.randint(0, model.config.vocab, segments.shape, generator=torch.Generator().manual_seed(0))
    found = model(tokens, positions, segments, lambda x, head: head.logits(x))[segments >= 0]
    model.reshard()
    return found


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_fp32_masters(tmp_path, world, monkeypatch, model_type, lora) -> None:
    directory = stored(tmp_path / "m", model_type, BF16 if lora else FP32)
    narrow = loaded(directory, world, lora=lora, frozen=not lora)
    names = adapter_names(narrow)
    assert {p.dtype for n, p in narrow.named_parameters() if n not in names} == {BF16}
    assert {p.dtype for n, p in narrow.named_parameters() if n in names} <= {FP32}
    monkeypatch.setattr(trainer, "hold_frozen", lambda *_: None)
    masters = loaded(directory, world, lora=lora, frozen=not lora)
    assert {p.dtype for p in masters.parameters()} == {FP32}
    assert torch.equal(logits(narrow), logits(masters))


def test_an_adapter_is_merged_into_what_the_checkpoint_stores(tmp_path, world) -> None:
    for dtype in (FP32, BF16):
        directory = stored(tmp_path / str(dtype) / "m", "qwen3", dtype)
        model = loaded(directory, world, lora=True)
        names = adapter_names(model)
        assert {p.dtype for n, p in model.named_parameters() if n not in names} == {dtype}
        base = dict(bridge.build(directory).named_parameters())
        plain = load_model(directory, World(), ModelConfig(path=str(directory)), seed=0, precision="fp32")
        merged, pairs, parameters = merged_weights(model), adapters(model), dict(model.named_parameters())
        for name, expected in plain.named_parameters():
            if (pair := pairs.get(name)) is not None:
                a, b = (whole(parameters[n].detach()) for n in (pair.a, pair.b))
                expected = expected + pair.scale * (b @ a)
                assert merged(name).dtype == FP32  # rounded once, by the export
            assert torch.equal(merged(name).float(), expected.detach()), name
        assert base.keys() == parameters.keys() - names


@pytest.fixture
def raw(tmp_path):
    raw = arithmetic(tmp_path)
    configured(tmp_path / "model", torch_dtype="bfloat16")
    lora = {"rank": 4, "alpha": 8}
    return {
        **raw,
        "model": {**raw["model"], "lora": lora},
        "train": {**raw["train"], "lr": 1e-2, "precision": "bf16"},
    }


def adapter_of(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.mark.long
def test_a_run_ends_with_the_bits_of_fp32_masters_and_so_does_its_resume(raw, monkeypatch) -> None:
    narrow = train(raw, "narrow")
    stopped(monkeypatch, 8, lambda: train(raw, "resumed"))
    resumed = train(raw, "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "hold_frozen", lambda *_: None)
        masters = train(raw, "masters")

    def everything(model, dtype, *_):
        for p in model.parameters():
            p.data = p.data.to(dtype)

    with monkeypatch.context() as patch:  # negative control
        patch.setattr(trainer, "hold_frozen", everything)
        rounded = train(raw, "rounded")
    assert same(adapter_of(narrow), adapter_of(resumed))
    assert same(adapter_of(narrow), adapter_of(masters))
    assert same(weights(narrow), weights(masters))
    assert not same(adapter_of(narrow), adapter_of(rounded))


def test_frozen_models_of_a_run_are_loaded_as_such(tmp_path: Path, monkeypatch) -> None:
    """So that a reference is held in the dtype of the computation (`load_model`), with no parameter that trains."""
    asked = list[bool]()

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options.get("frozen", False))
        return load_model(*args, **options)

    monkeypatch.setattr(model_source, "load_model", noted)
    raw = preferences(tmp_path, "dpo")
    raw["train"] = {**raw["train"], "steps": 1}
    train(raw, "a")
    assert asked == [False, False, True], "the model that is written out, the model that trains, and the reference"


def test_a_model_on_a_gpu_is_compiled_as_the_job_says(tmp_path: Path, monkeypatch) -> None:
    class Seen(Exception):
        pass

    def noted(model: Model, *_: Any, **__: Any) -> None:
        raise Seen(model.kernels.compiled)

    monkeypatch.setattr(trainer, "parallelize", noted)
    directory = checkpoint("qwen3", tmp_path)
    for device, setting, compiled in (("cuda", "auto", True), ("cpu", "auto", False), ("cuda", False, False)):
        world, spec = World(device=torch.device(device)), ModelConfig(path=str(directory))
        with pytest.raises(Seen, match=str(compiled)):
            load_model(directory, world, spec, seed=0, precision="fp32", compiled=setting)
