"""Runs whose base is held in four bits: what they resume to, send and leave behind."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from ptf.compute.world import World, joined
from ptf.config import loads
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.lora import merged_weights
from ptf.model.reference import export_difference
from ptf.model.sampling import LogitsProcessing
from ptf.recipes.sft.recipe import SFT
from ptf.rl.roles import Learner, LearnerSettings, LogprobModel
from ptf.train import adapter
from ptf.train.adapter import difference_of
from ptf.train.precompute import _start
from ptf.train.trainer import load_model
from tests import tiny
from tests.model.published import mxfp4_checkpoint
from tests.model.test_quantised_weights import WIDTHS, experts
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, configured
from tests.train.test_loop import facts, resumed_alike, same, stopped, train, weights

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture
def raw(tmp_path: Path) -> dict:
    raw = arithmetic(tmp_path)
    configured(tmp_path / "model", intermediate_size=128)
    lora = {**raw["model"], "lora": LORA, "quantization": "nf4"}
    return {**raw, "model": lora, "train": {**raw["train"], "lr": 1e-2}}


@pytest.mark.long
def test_a_run_resumes_to_the_bit_and_merges_its_adapter_into_the_weights_of_the_checkpoint(raw, monkeypatch, capsys):
    whole, _ = resumed_alike(raw, monkeypatch, 8)
    said = capsys.readouterr().out
    losses = [row["loss"] for row in facts(whole)]
    assert losses[-1] < losses[0] - 0.1

    spec = ModelConfig(path=str(whole / "start"), lora=LoraConfig(**LORA), quantization="nf4")
    trained = load_model(whole / "start", World(), spec, seed=0, precision="fp32")
    pairs = load_file(whole / "adapter" / "adapter_model.safetensors")
    merged, start = load_file(whole / "model" / "model.safetensors"), load_file(whole / "start" / "model.safetensors")
    rounded = dict(trained.under_hf_names(merged_weights(trained)))
    names = {name.removesuffix(".weight") for name in start if f"base_model.model.{name[:-7]}.lora_A.weight" in pairs}
    assert len(names) == 2 * 7
    for name in names:
        a, b = (pairs[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        assert torch.allclose(merged[f"{name}.weight"], start[f"{name}.weight"] + 2 * b @ a, atol=1e-7)
        assert not torch.allclose(start[f"{name}.weight"], rounded[f"{name}.weight"], atol=1e-4), "negative control"
    probe = json.loads((whole / "probe.json").read_text())
    assert export_difference(whole / "model", probe["tokens"], probe["logprobs"]) < 1e-5
    assert "model has the adapter and the weights of the checkpoint; beside the nf4 weights of training" in said
    assert "adapter (PEFT) was loaded again" in said


def test_a_published_gpt_oss_trains_beside_its_experts_as_they_are_stored(raw, tmp_path, monkeypatch, capsys):
    oss = tmp_path / "oss"
    stored = mxfp4_checkpoint(oss)
    Tokenizer.load(raw["model"]["path"]).save(oss)
    raw["model"] = {"path": str(oss), "lora": {**LORA, "targets": ["layers.*.attn.*_proj"]}, "quantization": "mxfp4"}
    raw["train"]["steps"] = 6
    raw["seed"] = 2  # of 0 and 1, rounding the merged weights to bf16 moves a token of the probe to another expert
    raw["checkpoint"] = {"every": 2, "keep": 2}
    whole = train(raw, "whole")
    said = capsys.readouterr().out
    stopped(monkeypatch, 4, lambda: train(raw, "stopped"))
    assert same(weights(whole), weights(train(raw, "stopped")))
    merged = load_file(whole / "model" / "model.safetensors")
    assert merged.keys() == stored.keys()
    changed = {name for name in merged if not torch.equal(merged[name], stored[name])}
    assert changed
    assert all(name.endswith("_proj.weight") and "self_attn" in name for name in changed), "experts are not rounded"
    assert "adapter (PEFT) was loaded again" in said
    difference = float(re.search(r"its log-probs differ by up to (\S+)", said)[1])
    assert difference < 0.05, "beside what bf16 rounds in the merged weights"


def test_bf16_under_fsdp_computes_what_the_dequantised_model_does(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "m", **WIDTHS)
    spec = ModelConfig(path=str(directory), lora=LoraConfig(**LORA), quantization="nf4")
    tokens = tiny.packed([[40, 20]], 64)
    with joined("cpu", 60) as world:
        packed = load_model(directory, world, spec, seed=0, precision="bf16")
        dequantised = dict(packed.hf_tensors())
        plain = load_model(directory, world, ModelConfig(path=str(directory)), seed=0, precision="bf16", frozen=True)
        found = []
        for values in (None, dequantised):
            if values:
                plain.load_hf_tensors(values)
            with torch.no_grad():
                logits = plain(tokens.tokens, tokens.positions, tokens.segments, lambda x, head: head.logits(x))
            plain.reshard()
            found.append(logits)
        loss, _ = of_keys(SFT).loss(packed, tokens, {})
        loss.backward()
        with torch.no_grad():
            ours = packed(tokens.tokens, tokens.positions, tokens.segments, lambda x, head: head.logits(x))
    assert torch.equal(ours, found[1])
    assert not torch.equal(ours, found[0]), "negative control: the weights that were not rounded"
    gradients = [p.grad for name, p in packed.named_parameters() if name.endswith("lora_b")]
    assert all(bool((gradient.to_local() != 0).any()) for gradient in gradients)


def test_a_policy_sends_what_it_computes_with(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "m", **WIDTHS)
    settings = LearnerSettings(
        directory=directory,
        section=ModelConfig(path=str(directory), lora=LoraConfig(**LORA), quantization="nf4"),
        train=TrainConfig(steps=10, lr=1e-2, precision="fp32", micro_batch_sequences=2),
        seed=0,
        seq_len=64,
        processing=LogitsProcessing(0.7),
        recipe=of_keys(SFT),
        tokenizer="",
    )
    learner = Learner(World(), settings)
    engine = LogprobModel(World(), replace(settings, section=ModelConfig(path=str(directory))))
    samples = [tiny.sample(n, n) for n in (20, 33, 7)]
    learner.update([[(s,) for s in samples]], 0)

    def worst() -> float:
        pairs = zip(learner.logprobs(samples), engine.logprobs(samples), strict=True)
        return max(float(abs(x - y).max()) for x, y in pairs)

    assert worst() > 1e-2
    found = learner.collect_weights(0)
    assert found is not None
    engine.model.load_hf_tensors({name: t for bucket in found[0] for name, t in bucket})
    assert worst() < 1e-5


def test_a_merged_model_that_is_not_the_checkpoint_with_the_adapter_is_no_success(raw, monkeypatch):
    export = adapter.export_adapter

    def damaged(model, source, merged, *rest):
        file = merged / "model.safetensors"
        tensors = {n: t * 1.5 if "down_proj" in n else t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        export(model, source, merged, *rest)

    monkeypatch.setattr("ptf.train.loop.export_adapter", damaged)
    with pytest.raises(UserError, match=r"loaded again, .*model differs from the trained model by"):
        train(raw, "run")
    assert not (Path(raw["output"]) / "run" / "adapter").exists()


def test_adapters_on_one_of_the_projections_of_packed_experts_are_written(tmp_path: Path) -> None:
    directory = experts(tmp_path / "m")
    lora = LoraConfig(**{**LORA, "targets": ["layers.*.attn.*_proj", "layers.*.moe.experts.gate_proj"]})
    spec = ModelConfig(path=str(directory), lora=lora, quantization="nf4")
    model = load_model(directory, World(), spec, seed=0, precision="fp32")
    form = model.peft()
    written = dict(form.tensors())
    assert written.keys() == form.names()
    up = [name for name in written if ".experts." in name and "up_proj" in name]
    assert up
    assert not any(bool(written[name].any()) for name in up)


def test_data_found_ahead_by_a_rounded_model_is_not_that_of_another(tmp_path: Path, raw: dict) -> None:
    directory = tiny.checkpoint(tmp_path / "m", **WIDTHS)
    model = {"path": str(directory), "lora": LORA}
    rounded, plain = (loads(yaml.safe_dump({**raw, "model": model | q})) for q in ({"quantization": "nf4"}, {}))
    assert _start(rounded, directory) != _start(plain, directory)


def test_what_does_not_go_with_it_is_refused(raw: dict) -> None:
    def message(**changes: object) -> str:
        with pytest.raises(UserError) as error:
            loads(yaml.safe_dump({**raw, **changes}))
        return str(error.value)

    assert "model.quantization  needs model.lora" in message(model={**raw["model"], "lora": None})
    trained = {**raw["model"], "trainable": ["embed"]}
    loads(yaml.safe_dump({**raw, "model": trained}))
    replaced = {**raw["model"], "replace": {"layers.*.mlp": {"use": "torch.nn:Identity"}}}
    assert "model.quantization  does not work with model.replace" in message(model=replaced)
    assert "in recipes sft, kd and rm only" in message(model=trained, recipe="dpo")
    assert "model.quantization  needs compute.mesh.tensor_parallel_size: 1" in message(
        compute={**raw["compute"], "mesh": {"tensor_parallel_size": 2}, "workers": 2}
    )


def test_the_difference_of_probes_is_the_largest() -> None:
    assert difference_of({"tokens": [1], "logprobs": [0.5, 1.0]}, {"tokens": [1], "logprobs": [0.25, 1.0]}) == 0.25
