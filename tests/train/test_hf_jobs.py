"""Whole runs of models of transformers (`model.backend: hf`): adapters, preferences, distillation, reward models, PPO,
GRPO and added tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from ptf.compute.tracking import read_metrics
from ptf.config import ConfigError, loads
from ptf.config.sections.model import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import hf_backend
from ptf.model.reference import export_difference
from ptf.publish.export_comparison import adapter_difference, model_difference
from ptf.train.components import layer_factory_of
from tests.model.foreign import foreign
from tests.model.wrappers import wrapper
from tests.tiny import arithmetic, online, write_jsonl
from tests.train.test_loop import facts, resumed_alike, same, train

LORA = {"rank": 4, "alpha": 8}
MULTIMODAL = ("llava", "gemma4")


def job(directory: Path, model_type: str, **model: Any) -> dict[str, Any]:
    """A raw job on a random checkpoint of transformers."""
    raw = arithmetic(directory)
    vocab = Tokenizer.load(str(directory / "model")).vocab_size
    if model_type in MULTIMODAL:  # eight tokens more, which stand for images
        wrapper(directory / "made", model_type, vocab + 8)
    else:
        foreign(directory / "made", model_type, vocab)
    for file in ("model.safetensors", "config.json"):
        (directory / "made" / file).replace(directory / "model" / file)
    return {
        **raw,
        "model": {"path": str(directory / "model"), "backend": "hf", **model},
        "train": {**raw["train"], "steps": 6, "lr": 1e-2, "validate_every": 3},
        "checkpoint": {"every": 3},
    }


def preferences(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    sums = np.random.default_rng(5).integers(1, 30, (40, 2)).tolist()
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    write_jsonl(directory / "train.jsonl", pairs[:30])
    write_jsonl(directory / "held_out.jsonl", pairs[30:])
    return raw


def peft_logprobs(base: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def test_an_adapter_resumes_to_the_bit_and_peft_reads_it(tmp_path, monkeypatch, capsys):
    raw = job(tmp_path, "olmo2", lora=LORA)
    whole, resumed = resumed_alike(raw, monkeypatch, 5)
    assert "14 adapters: model.layers.*.self_attn.q_proj" in capsys.readouterr().out
    adapters = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, resumed)]
    assert same(*adapters)
    rows = read_metrics(whole / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    probe = json.loads((whole / "probe.json").read_text())
    found = peft_logprobs(tmp_path / "model", whole / "adapter", probe["tokens"])
    assert float((found - torch.tensor(probe["logprobs"])).abs().max()) < 1e-5
    assert export_difference(whole / "model", probe["tokens"], probe["logprobs"]) < 1e-5
    assert export_difference(tmp_path / "model", probe["tokens"], probe["logprobs"]) > 1e-3  # control: the base
    config = loads(yaml.safe_dump(raw))
    assert model_difference(config, whole, whole / "model") < 1e-5
    assert adapter_difference(config, whole, whole / "adapter") < 1e-5


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", pytest.param("mamba", marks=pytest.mark.long)])
def test_adapters_of_other_modules(model_type, tmp_path, capsys):
    """Conv1D, experts that are stacked, and no attention; a policy without its adapters is its own reference."""
    raw = {**preferences(job(tmp_path, model_type, lora=LORA), tmp_path), "recipe": "dpo", "algo": {"beta": 0.5}}
    run = train(raw, "run")
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[0]["margin"] == 0.0  # the policy begins as its own reference
    assert rows[-1]["loss"] < rows[0]["loss"]
    probe = json.loads((run / "probe.json").read_text())
    found = peft_logprobs(tmp_path / "model", run / "adapter", probe["tokens"])
    assert float((found - torch.tensor(probe["logprobs"])).abs().max()) < 1e-5
    printed = capsys.readouterr().out
    assert ("none for the stacked matrices model.layers.*.mlp.experts.gate_up_proj" in printed) is (
        model_type == "mixtral"
    )


def test_targets_that_reach_nothing_are_named(tmp_path):
    directory = foreign(tmp_path / "m", "mixtral")

    def build(*targets: str):
        lora = ModelConfig(path="-", backend="hf", lora={**LORA, "targets": list(targets)})  # type: ignore[arg-type]
        return hf_backend.build(directory, factory=layer_factory_of(lora, adapted=True))

    build("*.q_proj")  # control
    with pytest.raises(UserError, match=r"\*\.experts\.\* matches nothing \(model\.layers\.\*\.mlp\.experts\.gate_up"):
        build("*.experts.*")
    with pytest.raises(UserError, match=r"lm_head matches nothing; .* there is model\.layers\.\*\.self_attn\.q_proj"):
        build("*.q_proj", "lm_head")


def test_full_weights_learn_from_preferences(tmp_path):
    raw = {**preferences(job(tmp_path, "cohere"), tmp_path), "recipe": "dpo", "algo": {"beta": 0.5}}
    raw["train"]["steps"] = 4
    rows = read_metrics(train(raw, "run") / "metrics.jsonl")
    assert abs(rows[0]["margin"]) < 1e-5
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_reward_model_is_transformers_classifier(tmp_path, lora):
    raw = {**preferences(job(tmp_path, "gpt2", lora=lora), tmp_path), "recipe": "rm"}
    run = train(raw, "run")
    rows = read_metrics(run / "metrics.jsonl")
    assert model_difference(loads(yaml.safe_dump(raw)), run, run / "model") < 1e-5
    probe = json.loads((run / "probe.json").read_text())
    scorer = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32).eval()
    assert type(scorer).__name__ == "GPT2ForSequenceClassification"
    with torch.no_grad():
        score = scorer(input_ids=torch.tensor([probe["tokens"]])).logits
    assert float(score) == pytest.approx(np.ravel(probe["values"])[-1], abs=1e-5)
    again = {**raw, "model": {**raw["model"], "path": str(run / "model"), "lora": None}}
    after = read_metrics(train(again, "again", train__steps=1) / "metrics.jsonl")
    assert after[0]["loss"] < rows[0]["loss"]  # of the same batch: it has learned, and the head was loaded, not drawn


def test_a_scalar_head_that_transformers_has_not_is_refused(tmp_path):
    raw = {**preferences(job(tmp_path, "mamba"), tmp_path), "recipe": "rm"}
    with pytest.raises(UserError, match="transformers has no classifier of mamba"):
        train(raw, "run")
    with pytest.raises(UserError, match=r"mamba has no scalar head \(reward models, critics\): transformers has no"):
        hf_backend.build(Path(raw["model"]["path"]), head="scalar")


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_student_learns_from_a_teacher(tmp_path, lora):
    raw = job(tmp_path, "olmo2", lora=lora)
    teacher = foreign(tmp_path / "teacher", "cohere", Tokenizer.load(raw["model"]["path"]).vocab_size)
    Tokenizer.load(raw["model"]["path"]).save(teacher)
    raw |= {"recipe": "kd", "algo": {"teachers": {"other": {"path": str(teacher)}}}}
    rows = read_metrics(train(raw, "run", train__steps=4) / "metrics.jsonl")
    assert rows[-1]["divergence"] < rows[0]["divergence"]


def sampled(raw: dict[str, Any], directory: Path, recipe: str, **rollout: Any) -> dict[str, Any]:
    made = online(raw, directory, "tests.rl.plugs:varied", **rollout)
    train = {"steps": 3, "lr": 1e-2, "precision": "fp32", "micro_batch_sequences": 2}
    return {**made, "recipe": recipe, "algo": {"kl_coef": 0.01}, "train": train}


@pytest.mark.parametrize(
    ("model_type", "recipe", "model", "rollout"),
    [
        ("olmo2", "grpo", {"lora": LORA}, {"lora_sync": "adapter"}),
        pytest.param("mixtral", "grpo", {}, {}, marks=pytest.mark.long),
        pytest.param("llava", "grpo", {"lora": LORA}, {"lora_sync": "adapter"}, marks=pytest.mark.long),
        pytest.param("gemma4", "grpo", {}, {}, marks=pytest.mark.long),
        ("gpt2", "ppo", {"tokens": {"added": ["<new>"]}}, {}),
        pytest.param("mamba", "grpo", {}, {}, marks=pytest.mark.long),
    ],
)
def test_rollouts_agree_with_the_trainer(tmp_path, model_type, recipe, model, rollout):
    rows = facts(train(sampled(job(tmp_path, model_type, **model), tmp_path, recipe, **rollout), "run"))
    assert len(rows) == 3
    assert max(row["logprob_diff_max"] for row in rows) < 1e-5
    assert max(row["canary_logprob_diff_max"] for row in rows) < 1e-5
    assert abs(rows[0]["kl_reference"]) < 1e-6
    assert rows[-1]["kl_reference"] != 0  # control: the weights moved


@pytest.mark.parametrize("model_type", ["olmo2", "gpt2"])
def test_added_tokens_grow_the_embedding_and_the_head(tmp_path, model_type):
    raw = job(tmp_path, model_type, tokens={"added": ["<a>", "<b>", "<c>"]})
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    run = train(raw, "run", train__steps=1)
    start = AutoModelForCausalLM.from_pretrained(run / "extended", dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    rows = before.config.vocab_size
    for old, new in zip(
        (before.get_input_embeddings(), before.get_output_embeddings()),
        (start.get_input_embeddings(), start.get_output_embeddings()),
        strict=True,
    ):
        assert len(new.weight) == rows + 3
        assert torch.equal(new.weight[:rows], old.weight)
        assert torch.allclose(new.weight[rows:], old.weight.mean(0).expand(3, -1), atol=1e-6)
    assert after.config.vocab_size == rows + 3
    assert model_difference(loads(yaml.safe_dump(raw)), run, run / "model") < 1e-5


def test_an_adapter_of_a_language_model_is_loaded_into_the_whole_model(tmp_path):
    """The vision tower has modules of the same names, as many layers, and gets none."""
    from peft import PeftModel

    raw = job(tmp_path, "llava", lora=LORA)
    run = train(raw, "run")
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert adapter
    assert all(".language_model." in name for name in adapter)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, run / "adapter").eval()
    assert sum("lora_" in name for name, _ in whole.named_parameters()) == len(adapter)
    probe = json.loads((run / "probe.json").read_text())
    ids = torch.tensor([probe["tokens"]])
    with torch.no_grad():
        found = whole(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert float((found - torch.tensor(probe["logprobs"])).abs().max()) < 1e-5
    assert export_difference(run / "model", probe["tokens"], probe["logprobs"]) < 1e-5
    assert export_difference(tmp_path / "model", probe["tokens"], probe["logprobs"]) > 1e-3  # control: the base
    stored, written = (load_file(d / "model.safetensors") for d in (tmp_path / "model", run / "model"))
    outside = {name for name, *_ in hf_backend.build(tmp_path / "model", head="lm").carried(tmp_path / "model")}
    assert same({n: stored[n] for n in outside}, {n: written[n] for n in outside})


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "model_type"), [("dpo", "gemma4"), ("kd", "llava")])
def test_language_models_learn_from_preferences_and_teachers(tmp_path, recipe, model_type):
    raw = job(tmp_path, model_type)
    if recipe == "dpo":
        raw = {**preferences(raw, tmp_path), "recipe": "dpo", "algo": {"beta": 0.5}}
    else:
        vocab = AutoConfig.from_pretrained(raw["model"]["path"]).text_config.vocab_size
        teacher = wrapper(tmp_path / "teacher", "gemma4", vocab)
        Tokenizer.load(raw["model"]["path"]).save(teacher)
        raw |= {"recipe": "kd", "algo": {"teachers": {"other": {"path": str(teacher)}}}}
    rows = read_metrics(train(raw, "run", train__steps=4) / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("model_type", ["gemma4", pytest.param("llava", marks=pytest.mark.long)])
def test_added_tokens_grow_the_tables_of_a_language_model(tmp_path, model_type):
    raw = job(tmp_path, model_type)
    rows = AutoConfig.from_pretrained(tmp_path / "model").text_config.vocab_size
    added = [f"<{i}>" for i in range(11)]  # eight take the rows that the model has to spare
    raw["model"]["tokens"] = {"added": added}
    run = train(raw, "run", train__steps=1)
    stored, written = (load_file(d / "model.safetensors") for d in (tmp_path / "model", run / "extended"))
    grown = {n for n in stored if stored[n].shape != written[n].shape}
    assert {n.split(".")[-2] for n in grown} == (
        {"embed_tokens", "embed_tokens_per_layer"} if model_type == "gemma4" else {"embed_tokens", "lm_head"}
    )
    assert all(len(written[n]) == rows + 3 for n in grown)
    assert same({n: stored[n] for n in stored if n not in grown}, {n: written[n] for n in stored if n not in grown})
    before, after = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "model", run / "model"))
    assert {k: v for k, v in after.items() if k != "text_config"} == {
        k: v for k, v in before.items() if k != "text_config"
    }
    sizes = {k for k, v in after["text_config"].items() if before["text_config"][k] != v}
    assert sizes == {"vocab_size"} | ({"vocab_size_per_layer_input"} if model_type == "gemma4" else set())
    assert model_difference(loads(yaml.safe_dump(raw)), run, run / "model") < 1e-5


def test_what_stays_left_out_is_refused_by_name(tmp_path):
    raw = job(tmp_path, "olmo2", lora=LORA, quantization="nf4")
    with pytest.raises(ConfigError, match=r"model\.quantization +is not supported with model\.backend: hf"):
        loads(yaml.safe_dump(raw))
