"""LoRA in a run: resume is exact, what is left behind loads, GRPO is its own reference,
and learning rates go by group."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from ptf.compute.world import CPU, World
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.document import Document
from ptf.errors import UserError
from ptf.model.lora import adapter_names
from ptf.model.reference import export_difference
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing
from ptf.recipes.sft.recipe import SFT
from ptf.rl.engines.native import NativeEngine
from ptf.rl.roles import Learner, LearnerSettings, LogprobModel
from ptf.rl.weights.verification import SyncError
from ptf.train import adapter
from ptf.train.components import layer_factory_of
from ptf.train.optim import groups
from ptf.train.trainer import Trainer, load_model
from tests import tiny
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, online
from tests.train.test_loop import facts, resumed_alike, same, train, weights

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture
def raw(tmp_path):
    raw = arithmetic(tmp_path)
    return {**raw, "model": {**raw["model"], "lora": LORA}, "train": {**raw["train"], "lr": 1e-2}}


def test_a_resumed_run_ends_with_the_same_bits_and_its_checkpoints_hold_what_trains(raw, monkeypatch):
    whole, resumed = resumed_alike(raw, monkeypatch, 8)
    adapters = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, resumed)]
    assert same(*adapters)
    assert not same(weights(whole), {n: t for n, t in load_file(whole / "start" / "model.safetensors").items()}), (
        "negative control: nothing was trained"
    )
    (newest, *_) = sorted((whole / "checkpoints").glob("step_*"), reverse=True)
    saved = FileSystemReader(newest / "tensors").read_metadata().state_dict_metadata
    kept = {n.removeprefix("model.") for n in saved if n.startswith("model.")}
    model = load_model(whole / "start", World(), ModelConfig(path="", lora=LORA), seed=0, precision="fp32")
    assert kept == adapter_names(model)
    assert {n.split(".", 2)[2].rpartition(".")[0] for n in saved if n.startswith("optimizer.state.")} == adapter_names(
        model
    )


def test_a_run_leaves_an_adapter_and_merged_weights_that_give_the_same(raw):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = train(raw, "run")
    probe = json.loads((run / "probe.json").read_text())
    assert export_difference(run / "model", probe["tokens"], probe["logprobs"]) < 1e-5
    assert export_difference(run / "start", probe["tokens"], probe["logprobs"]) > 1e-3, "negative control: the base"
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "start")
    assert not (run / "adapter.unchecked").exists()
    base = AutoModelForCausalLM.from_pretrained(run / "start", dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor([probe["tokens"]])
        found = (
            PeftModel.from_pretrained(base, run / "adapter")(input_ids=ids)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, ids[0, 1:, None])
            .squeeze(1)
        )
    assert float((found - torch.tensor(probe["logprobs"])).abs().max()) < 1e-5


@pytest.mark.parametrize("what", ["model", "adapter"])
def test_an_export_that_is_not_what_was_trained_is_no_success(raw, monkeypatch, what):
    if what == "adapter":
        save = adapter.save
        monkeypatch.setattr(
            adapter,
            "save",
            lambda tensors, *a, **k: save(((n, t * 1.5 if "lora_B" in n else t) for n, t in tensors), *a, **k),
        )
    else:
        export = adapter.export_adapter

        def damaged(model, source, merged, *rest):
            file = merged / "model.safetensors"
            save_file(
                {n: t * 1.5 if "down_proj" in n else t for n, t in load_file(file).items()},
                file,
                metadata={"format": "pt"},
            )
            export(model, source, merged, *rest)

        monkeypatch.setattr("ptf.train.loop.export_adapter", damaged)
    with pytest.raises(UserError, match=f"loaded again, .*{what}.* differs from the trained model by"):
        train(raw, "run")
    assert (Path(raw["output"]) / "run" / "model").is_dir()
    assert not (Path(raw["output"]) / "run" / "adapter").exists()


def test_patterns_that_match_nothing_stop_the_run_before_it_trains(raw):
    """Of the model, tests/model/test_lora.py says so."""
    message = r"train\.lr_multipliers: embed matches nothing; there is layers\.\*\.attn\.q_proj\.lora_a"
    with pytest.raises(UserError, match=message):
        train({**raw, "train": {**raw["train"], "lr_multipliers": {"embed": 10.0}}})


@pytest.mark.parametrize("sent", ["merged", "adapter"])
def test_grpo_trains_adapters(tmp_path, monkeypatch, sent):
    load, bytes_sent = NativeEngine.load_weights, list[int]()

    def loaded(engine, buckets, manifest):
        bytes_sent.append(sum(tensor.nbytes for bucket in buckets for _, tensor in bucket))
        return load(engine, buckets, manifest)

    monkeypatch.setattr(NativeEngine, "load_weights", loaded)
    raw = online(arithmetic(tmp_path), tmp_path, "tests.rl.plugs:varied", lora_sync=sent)
    raw |= {"algo": {"kl_coef": 0.01}, "model": {**raw["model"], "lora": LORA}}
    raw["train"] = {"steps": 4, "lr": 1e-2, "precision": "fp32", "micro_batch_sequences": 2}
    run = train(raw, "grpo")
    rows = facts(run)
    assert rows[0]["kl_reference"] == 0 < rows[-1]["kl_reference"]
    assert max(row["canary_logprob_diff_max"] for row in rows) < 1e-5
    assert max(row["logprob_diff_max"] for row in rows) < 1e-5
    whole = sum(t.nbytes for t in load_file(run / "model" / "model.safetensors").values())
    assert len(bytes_sent) == 5
    assert all(size == whole if sent == "merged" else size < whole / 2 for size in bytes_sent)
    assert (run / "adapter" / "adapter_config.json").is_file()


def test_learning_rates_go_by_group(tmp_path):
    directory = tiny.checkpoint(tmp_path / "m", tied=False)
    model = load_model(
        directory,
        World(),
        ModelConfig(path=str(directory), trainable=["embed", "head", "norm"]),
        seed=0,
        precision="fp32",
    )
    config = TrainConfig(
        steps=10, lr=1e-3, schedule="constant", weight_decay=0.5, lr_multipliers={"embed": 10.0, "*e*": 2.0}
    )
    trainer = Trainer(model, World(), config)
    named = {id(p): n for n, p in model.named_parameters()}
    made = {
        (g["factor"], g["weight_decay"]): {named[id(p)] for p in g["params"]}
        for g in groups(model, 0.5, config.lr_multipliers)
    }
    assert made == {(10.0, 0.5): {"embed.weight"}, (2.0, 0.5): {"head.weight"}, (2.0, 0.0): {"norm.weight"}}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    metrics = trainer.step([tiny.packed([[30, 11]], 48)], of_keys(SFT), 3)
    assert metrics["lr"] == 1e-3
    assert sorted((g["lr"], g["weight_decay"]) for g in trainer.optimizer.param_groups) == [
        (2e-3, 0.0),
        (2e-3, 0.5),
        (1e-2, 0.5),
    ]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"embed.weight", "head.weight", "norm.weight"}
    assert len(trainer.optimizer.state) == 3, "moments of what trains alone"


def policy(
    directory: Path, section: ModelConfig, processing: LogitsProcessing = NO_LOGITS_PROCESSING
) -> LearnerSettings:
    return LearnerSettings(
        directory=directory,
        section=section,
        train=TrainConfig(steps=10, lr=1e-2, precision="fp32", micro_batch_sequences=2),
        seed=0,
        seq_len=64,
        processing=processing,
        recipe=of_keys(SFT),
        tokenizer="",
    )


def test_a_policy_is_its_own_reference_and_is_sent_merged(tmp_path):
    directory = tiny.checkpoint(tmp_path / "m")
    spec = ModelConfig(path=str(directory), lora=LORA)  # type: ignore[arg-type]
    settings = policy(directory, spec, LogitsProcessing(0.7))
    learner = Learner(World(), settings)
    reference = LogprobModel(World(), replace(settings, section=ModelConfig(path=str(directory))))
    samples: list[Document] = [tiny.sample(n, n) for n in (20, 33, 7)]
    units = [(s,) for s in samples]
    learner.update([units], 0)
    learner.update([units], 1)

    def worst(a, b):
        return max(float(abs(x - y).max()) for x, y in zip(a, b, strict=True))

    assert worst(learner.base_logprobs(samples), reference.logprobs(samples)) == 0
    assert worst(learner.logprobs(samples), reference.logprobs(samples)) > 1e-2
    found = learner.collect_weights(0)
    assert found is not None
    reference.model.load_hf_tensors({name: t for bucket in found[0] for name, t in bucket})
    assert worst(learner.logprobs(samples), reference.logprobs(samples)) < 1e-5


@pytest.mark.parametrize("fault", ["dropped", "garbled", "the one before", "of a whole model"])
def test_an_adapter_that_arrives_wrong_is_refused(tmp_path, fault):
    directory = tiny.checkpoint(tmp_path / "m")
    spec = ModelConfig(path=str(directory), lora=LORA)  # type: ignore[arg-type]
    learner = Learner(World(), policy(directory, spec))
    engine = NativeEngine(
        str(directory), device=CPU, dtype=torch.float32, version=-1, factory=layer_factory_of(spec, adapted=True)
    )
    found = learner.collect_weights(0, None, True)
    assert found is not None
    (bucket,), manifest = found
    engine.load_weights([bucket], manifest)
    learner.update([[(tiny.sample(20, 1),)]], 0)
    found, whole = learner.collect_weights(1, None, True), learner.collect_weights(1)
    assert found is not None
    assert whole is not None
    (after,), right = found
    name, tensor = after[0]
    arrived = {
        "dropped": after[1:],
        "garbled": [(name, tensor * 1.01), *after[1:]],
        "the one before": bucket,
        "of a whole model": whole[0][0],
    }[fault]
    tokens = tiny.sample(30, 2).tokens
    before = engine.prompt_logprobs([tokens])[0]
    with pytest.raises(SyncError):
        engine.load_weights([arrived], right)
    assert (engine.prompt_logprobs([tokens])[0] == before).all()
    engine.load_weights([after], right)  # the control
    assert float(abs(engine.prompt_logprobs([tokens])[0] - learner.prompt_logprobs([tokens])[0]).max()) < 1e-5
    assert (engine.prompt_logprobs([tokens])[0] != before).any()
