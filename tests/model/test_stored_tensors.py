"""What a checkpoint's tensors mean where its config.json says something else, and that none is lost or rounded."""

import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ptf.compute.world import World, joined
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.data.batch import Batch
from ptf.errors import UserError
from ptf.model import bridge, families, hf_backend, model_files, model_writer
from ptf.model.reference import random_reference
from ptf.model.tensor_files import has_own_head
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.vllm_engine import _model_arguments
from ptf.train.model_source import ModelSource
from ptf.train.trainer import load_model
from tests.model.foreign import foreign
from tests.tiny import checkpoint, configured, packed, sample

BF16, FP32 = torch.bfloat16, torch.float32
Backend = Literal["ptf", "hf"]


def rewritten(directory: Path, changes: dict[str, torch.Tensor], **config: Any) -> Path:
    """Change tensors of a checkpoint, and settings of its config.json."""
    file = directory / "model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})
    return configured(directory, **config)


def with_head(directory: Path, changed: float) -> Path:
    """Store a head beside the embedding that config.json ties it to; `changed` is by how much they differ."""
    stored = load_file(directory / "model.safetensors")
    embed = next(stored[n] for n in ("model.embed_tokens.weight", "transformer.wte.weight") if n in stored)
    head = embed.clone()
    head[-1, 0] += changed
    return rewritten(directory, {"lm_head.weight": head}, tie_word_embeddings=True)


def loaded(directory: Path, backend: Backend, **spec: Any):
    """Load a model, which `ptf check` takes too."""
    model = ModelConfig(path="-", backend=backend, **spec)
    ModelSource(model, directory).raise_if_unfit("lm")
    return load_model(directory, World(), model, seed=0, precision="fp32")


@torch.no_grad()
def logits(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.logits(x))


def exported(model: Any, source: Path, directory: Path) -> dict[str, torch.Tensor]:
    tensors, carried = model.hf_tensors(), model.carried(source)
    model_writer.save_hf(tensors, source, directory, writes=True, carried=carried)
    return load_file(directory / "model.safetensors")


MODELS: list[tuple[Backend, Any]] = [("ptf", checkpoint), ("hf", checkpoint), ("hf", lambda d: foreign(d, "gpt2"))]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=2.0)])
@pytest.mark.parametrize(("backend", "made"), MODELS)
def test_a_head_unlike_the_embedding_is_not_tied(backend, made, lora, tmp_path):
    if lora and made is not checkpoint:
        lora = LoraConfig(rank=2, alpha=2.0, targets=["*.c_attn"])
    source, batch = with_head(made(tmp_path / "m"), 1.0), packed([[9]], 9)
    model = loaded(source, backend, lora=lora)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=FP32).eval()(input_ids=batch.tokens).logits
    assert torch.allclose(logits(model, batch), theirs, atol=1e-4)
    tied = loaded(with_head(made(tmp_path / "tied"), 0.0), backend)
    assert tied.config.tied
    assert not torch.allclose(logits(tied, batch), theirs, atol=1e-2)  # control
    stored, after = load_file(source / "model.safetensors"), exported(model, source, tmp_path / "out")
    assert after.keys() == stored.keys()
    assert torch.equal(after["lm_head.weight"], stored["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not model_files.unties(tmp_path / "out")


def test_an_untied_head_is_found_in_shards_and_by_engines(tmp_path, monkeypatch):
    source = with_head(checkpoint(tmp_path / "m"), 1.0)
    monkeypatch.setattr(model_writer, "SHARD_BYTES", 50_000)
    whole = dict(load_file(source / "model.safetensors"))
    model_writer.save_hf(iter(whole.items()), source, tmp_path / "s", writes=True)
    shards = configured(tmp_path / "s", tie_word_embeddings=True)
    assert (shards / "model.safetensors.index.json").is_file()
    assert model_files.unties(shards)
    assert bridge.build(shards, head="lm").hf_names() == whole.keys()
    assert _model_arguments(shards, 0, "float32", 64)["hf_overrides"] == {"tie_word_embeddings": False}
    engine = NativeEngine(str(shards), device=torch.device("cpu"), dtype=FP32, version=0)
    tokens = sample(9, 0).tokens.astype(np.int32)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=FP32).eval()
    expected = theirs(input_ids=torch.tensor(tokens[None]).long()).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens[1:, None]).long())[:, 0]
    assert np.abs(engine.prompt_logprobs([tokens])[0] - expected.detach().numpy()).max() < 1e-4


def test_tables_are_compared_to_their_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr("ptf.model.tensor_files.ROWS", 10)
    assert not has_own_head(with_head(checkpoint(tmp_path / "equal"), 0.0))
    assert has_own_head(with_head(checkpoint(tmp_path / "last row"), 1e-3))
    assert not has_own_head(checkpoint(tmp_path / "none"))


def test_a_second_tensor_of_a_tied_parameter_is_not_dropped(tmp_path, monkeypatch):
    """Of names that are not known as those of heads."""
    source = with_head(foreign(tmp_path / "m", "gpt2"), 1.0)
    monkeypatch.setattr(model_files, "has_own_head", lambda _: False)
    with pytest.raises(UserError, match=r"unlike: transformer\.wte\.weight is not lm_head\.weight"):
        loaded(source, "hf")


def hybrid(directory: Path, model_type: str) -> Path:
    family = families.family_of({"model_type": model_type})
    random_reference(family.random_config(random.Random(1)) | {"dtype": "bfloat16"}, 0).save_pretrained(directory)
    return directory


KEPT = ("A_log", "linear_attn.norm.weight", "e_score_correction_bias", "lm_head.weight", "model.norm.weight")


@pytest.mark.parametrize("backend", ["ptf", "hf"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next", "glm4_moe", "qwen3"])
def test_each_tensor_keeps_the_dtype_that_its_file_had(model_type, backend, tmp_path):
    source = hybrid(tmp_path / "m", model_type)
    stored = load_file(source / "model.safetensors")
    narrow = {n: t if n.endswith(KEPT) or not t.is_floating_point() else t.to(BF16) for n, t in stored.items()}
    rewritten(source, narrow, dtype="bfloat16")
    assert {t.dtype for t in narrow.values()} == {BF16, FP32}
    after = exported(loaded(source, backend), source, tmp_path / "out")
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in narrow.items()}
    assert all(torch.equal(after[n], narrow[n]) for n in narrow)


@pytest.mark.parametrize("backend", ["ptf", "hf"])
def test_a_frozen_tensor_that_is_stored_in_fp32_is_held_in_it(backend, tmp_path):
    source = checkpoint(tmp_path / "m")
    stored = load_file(source / "model.safetensors")
    narrow = {n: t if n.endswith("norm.weight") else t.to(BF16) for n, t in stored.items()}
    rewritten(source, narrow, dtype="bfloat16")
    spec = ModelConfig(path="-", backend=backend, lora=LoraConfig(rank=2, alpha=2.0))
    with joined("cpu", 60) as world:
        model = load_model(source, world, spec, seed=0, precision="bf16")
        after = exported(model, source, tmp_path / "out")
    assert all(torch.equal(after[n], narrow[n]) for n in narrow if n.endswith("norm.weight"))
    held = {n: p.dtype for n, p in model.named_parameters() if "lora" not in n}
    assert {d for n, d in held.items() if n.endswith("norm.weight")} == {FP32}
    assert {d for n, d in held.items() if not n.endswith("norm.weight")} == {BF16}


FURTHER = {  # config.json: the name of a tensor of a layer that predicts further tokens
    "qwen3_next": ({}, "mtp.layers.0.mlp.gate.weight"),
    "glm4_moe": ({"num_nextn_predict_layers": 1}, "model.layers.{n}.mlp.experts.0.gate_proj.weight"),
    "deepseek_v3": ({"num_nextn_predict_layers": 1}, "model.layers.{n}.shared_head.head.weight"),
    "olmo2": ({}, "model.mtp_block.0.eh_proj.weight"),
}


@pytest.mark.parametrize("model_type", FURTHER)
def test_layers_that_predict_further_tokens_come_back(model_type, tmp_path):
    settings, name = FURTHER[model_type]
    source = hybrid(tmp_path / "m", model_type)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    mtp = torch.randn(3, 5).to(BF16)
    rewritten(source, {name.format(n=layers): mtp, "model.rotary_emb.inv_freq": torch.ones(4)}, **settings)
    stored = load_file(source / "model.safetensors")
    backends: list[Backend] = ["hf"] if model_type == "olmo2" else ["hf", "ptf"]
    for backend in backends:
        after = exported(loaded(source, backend), source, tmp_path / backend)
        assert after.keys() == stored.keys()
        assert all(torch.equal(after[n], stored[n]) and after[n].dtype == stored[n].dtype for n in stored)
    assert name.format(n=layers) in {name for name, *_ in hf_backend.build(source, head="lm").carried(source)}
    rewritten(source, {f"model.layers.{layers + 1}.mlp.gate.weight": mtp})
    with pytest.raises(UserError, match=f"unexpected: model.layers.{layers + 1}"):  # control
        loaded(source, "hf")


def test_a_dtype_that_an_operator_does_not_take_is_said(tmp_path):
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model("falcon_h1", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=FP32).save_pretrained(tmp_path / "m")
    spec = ModelConfig(path="-", backend="hf")
    with joined("cpu", 60) as world:
        with pytest.raises(UserError, match=r"falcon_h1 in bfloat16 on this cpu .*train\.precision: fp32"):
            load_model(tmp_path / "m", world, spec, seed=0, precision="bf16")
        load_model(tmp_path / "m", world, spec, seed=0, precision="fp32")  # control
