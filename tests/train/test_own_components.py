"""Runs of models with components, heads and tokens of the user's own, from the config to the gate that publishing has
to pass."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from ptf import storage
from ptf.compute.tracking import read_metrics
from ptf.config import ConfigError, Job, loads
from ptf.data.added import tokenizer_of
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.evaluate.measurement import measure_run
from ptf.publish.export_comparison import model_difference
from ptf.rl.engines.native import NativeEngine
from ptf.run import run
from ptf.train.components import layer_factory_of
from tests.tiny import arithmetic, checkpoint, codes, online, write_jsonl
from tests.train.test_loop import facts, same, stopped, weights


def job_of(raw: dict, **changes) -> Job:
    for key, value in changes.items():
        section, name = key.split("__")
        raw = {**raw, section: {**raw[section], name: value}}
    return loads(yaml.safe_dump(raw))


@pytest.fixture
def raw(tmp_path):
    return arithmetic(tmp_path)


NARROW = {"layers.*.mlp": {"use": "tests.model.own:NarrowMLP", "args": {"width": 16}}}


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


def test_a_replaced_layer_trains_resumes_generates_and_is_not_published_as_plain(raw, monkeypatch, capsys):
    job = job_of(raw, model__replace=NARROW)
    whole = run(job, "whole")
    stopped(monkeypatch, 8, lambda: run(job, "stopped"))
    resumed = run(job, "stopped")
    assert facts(whole) == facts(resumed)
    assert same(weights(whole), weights(resumed))
    assert losses(whole)[-1] < losses(whole)[0]
    own = load_file(whole / "model" / "components.safetensors")
    assert same(own, load_file(resumed / "model" / "components.safetensors"))
    assert set(own) == {f"layers.{i}.mlp.{n}.weight" for i in range(2) for n in ("into", "out")}
    assert own["layers.0.mlp.into.weight"].shape == (16, 64)
    probe = json.loads((whole / "probe.json").read_text())
    factory = layer_factory_of(job.model)
    engine = NativeEngine(
        str(whole / "model"), device=torch.device("cpu"), dtype=torch.float32, version=0, factory=factory
    )
    assert np.allclose(engine.prompt_logprobs([np.array(probe["tokens"])])[0], probe["logprobs"], atol=1e-5)
    with pytest.raises(UserError, match=r"not published: layers of model\.replace.*components\.safetensors"):
        model_difference(job, whole, whole / "model")
    capsys.readouterr()
    run(
        job_of(raw, model__replace=NARROW, model__path=str(whole / "model"), model__init="pretrained", train__steps=1),
        "further",
    )
    said = capsys.readouterr().out
    assert "these tensors have no Hugging Face name: layers.0.mlp.into.weight" in said
    assert "drawn from the seed" not in said


def test_a_layer_that_keeps_its_tensors_is_published_if_it_computes_the_same(raw):
    same_mlp = job_of(raw, model__replace={"layers.*.mlp": {"use": "tests.model.own:SameMLP"}}, train__steps=3)
    found, plain = run(same_mlp, "same"), run(job_of(raw, train__steps=3), "plain")
    assert same(weights(found), weights(plain)) is False  # its weights begin as its constructor leaves them
    assert model_difference(same_mlp, found, found / "model") < 1e-4
    probe = json.loads((found / "probe.json").read_text())
    del probe["digest"]
    storage.write_record(str(found / "probe.json"), {**probe, "logprobs": [p - 0.1 for p in probe["logprobs"]]})
    # negative control: one that computes something else
    with pytest.raises(UserError, match="differs from the trained model"):
        model_difference(same_mlp, found, found / "model")


def test_a_declared_head_trains_by_its_own_loss_and_is_published_in_its_own_file(raw, tmp_path):
    job = job_of(raw, model__head={"use": "tests.model.own:DeepHead", "args": {"width": 40}})
    found = run(job, "deep")
    assert losses(found)[-1] < losses(found)[0]
    held = load_file(found / "model" / "head.safetensors")
    assert held["head.into.weight"].shape == (40, 64)
    assert not any(name.startswith(("head", "lm_head")) for name in weights(found))
    assert model_difference(job, found, found / "model") < 1e-4
    held["head.out.bias"] += 0.01
    save_file(held, found / "model" / "head.safetensors")
    with pytest.raises(UserError, match="differs from the trained model"):
        model_difference(job, found, found / "model")


@pytest.mark.long
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_scalar_head_is_a_transformers_classifier(raw, tmp_path, init, capsys):
    if init == "pretrained":
        tokenizer = Tokenizer.load(str(tmp_path / "model"))
        checkpoint(tmp_path / "model", vocab_size=tokenizer.vocab_size)
        tokenizer.save(tmp_path / "model")
    raw = {**raw, "recipe": {"use": "tests.train.recipes:Value"}, "model": {**raw["model"], "init": init}}
    job = job_of(raw)
    found = run(job, "value")
    assert ("drawn from the seed: head.weight" in capsys.readouterr().out) is (init == "pretrained")
    assert losses(found)[-1] < losses(found)[0]
    assert "score.weight" in weights(found)
    assert weights(found)["score.weight"].shape == (1, 64)
    probe = json.loads((found / "probe.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(found / "model", dtype=torch.float32)
    assert model.config.num_labels == 1
    for n in (1, 20, 64):
        score = model(torch.tensor([probe["tokens"][:n]])).logits[0, 0]
        if probe["tokens"][n - 1] != model.config.pad_token_id:
            assert abs(float(score.detach()) - probe["values"][n - 1]) < 1e-5
    assert model_difference(job, found, found / "model") < 1e-5
    further = run(
        job_of(raw, model__path=str(found / "model"), model__init="pretrained", train__steps=1, train__lr=1e-12),
        "further",
    )
    assert "drawn from the seed" not in capsys.readouterr().out
    assert abs(losses(further)[0] - losses(found)[-1]) < losses(found)[0] / 2  # it goes on where it was
    tensors = weights(found)
    save_file(
        {**tensors, "score.weight": tensors["score.weight"] + 0.01},
        found / "model" / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match="differs from the trained model"):
        model_difference(job, found, found / "model")


def items(directory: Path) -> Path:
    """Chats about items by their semantic ids."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+<a_{i % 4}><b_{i % 3}>="},
                {"role": "assistant", "content": f"<a_{(i + 1) % 4}><b_{i % 3}>"},
            ]
        }
        for i in range(120)
    ]
    return write_jsonl(directory / "items.jsonl", rows)


@pytest.mark.long
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_semantic_ids_are_single_tokens_everywhere(raw, tmp_path, init):
    base = Tokenizer.load(str(tmp_path / "model"))
    if init == "pretrained":
        checkpoint(tmp_path / "model", vocab_size=base.vocab_size)
        base.save(tmp_path / "model")
    raw = {**raw, "data": {**raw["data"], "sources": {"items": {"path": str(items(tmp_path))}}, "validation": {}}}
    with pytest.raises(UserError, match="cannot encode"):
        run(job_of(raw, model__init=init, train__validate_every=0), "without")
    job = job_of(raw, model__init=init, model__tokens={"added": codes(4, 3)}, train__validate_every=0)
    found = run(job, "with")
    assert losses(found)[-1] < losses(found)[0]
    served = Tokenizer.load(str(found / "model"))
    assert served.encode("<a_0><b_2>") == [base.vocab_size, base.vocab_size + 6]
    assert served.decode(served.encode("1<a_3>2")) == "1<a_3>2"
    assert served.identity == tokenizer_of(str(tmp_path / "model"), job.model.tokens).identity != base.identity
    assert json.loads((found / "model" / "config.json").read_text())["vocab_size"] == base.vocab_size + 7
    assert len(weights(found)["model.embed_tokens.weight"]) == base.vocab_size + 7
    assert model_difference(job, found, found / "model") < 1e-4
    began = load_file(found / "extended" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.allclose(began[base.vocab_size :], began[: base.vocab_size].mean(0).expand(7, -1), atol=1e-7)
    first = run(job, "again")
    assert same(weights(first), weights(found))
    again = {"init": "pretrained", "path": str(found / "model"), "tokens": {"added": codes(4, 3)}}
    further = run(job_of({**raw, "model": again}, train__validate_every=0, train__steps=1), "further")
    kept = load_file(further / "extended" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(kept, weights(found)["model.embed_tokens.weight"])  # they are there: nothing begins anew


def test_tokens_begin_as_their_descriptions(raw, tmp_path):
    rows = [{"token": "<one>", "description": "1"}, {"token": "<sum>", "description": "1+2"}]
    file = write_jsonl(tmp_path / "tokens.jsonl", rows)
    found = run(job_of(raw, model__tokens={"file": str(file), "init": "description"}, train__steps=1), "described")
    base = Tokenizer.load(str(tmp_path / "model"))
    began = load_file(found / "extended" / "model.safetensors")["model.embed_tokens.weight"]
    one, two, plus = (began[base.encode(c)[0]] for c in "12+")
    assert torch.equal(began[base.vocab_size], one)
    assert torch.allclose(began[base.vocab_size + 1], (one + two + plus) / 3, atol=1e-7)


def test_what_is_wrong_with_added_tokens_is_said(raw, tmp_path):
    for tokens, why in [
        ({"special": True}, "adds none"),
        ({"added": ["<x>"], "init": "vectors"}, "expected mean, description or a safetensors file, got the text"),
        ({"added": ["<x>"], "init": "description"}, "needs model.tokens.file"),
    ]:
        with pytest.raises(ConfigError, match=why):
            job_of(raw, model__tokens=tokens)
    with pytest.raises(UserError, match="'<x>' is listed twice"):
        run(job_of(raw, model__tokens={"added": ["<x>", "<x>"]}), "twice")
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"token": "<y>"}, {"name": "<z>"}])
    with pytest.raises(UserError, match=r"bad\.jsonl:2 is not a JSON object with a token"):
        run(job_of(raw, model__tokens={"file": str(bad)}), "bad")
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"token": "<y>"}])
    with pytest.raises(UserError, match="1 tokens have none: <y>"):
        run(job_of(raw, model__tokens={"file": str(bare), "init": "description"}), "bare")


def test_a_tokenizer_larger_than_the_vocabulary_stops_the_run(raw, tmp_path):
    larger = Tokenizer.load(str(tmp_path / "model"))
    larger.add(["<x>"])
    larger.save(tmp_path / "larger")
    with pytest.raises(UserError, match=r"rows for 21 tokens.*model\.tokens"):
        run(job_of(raw, model__tokenizer=str(tmp_path / "larger")), "larger")
    still_larger = job_of(raw, model__tokenizer=str(tmp_path / "larger"), model__tokens={"added": ["<y>"]})
    with pytest.raises(UserError, match=r"rows for 21 tokens"):  # before further tokens get rows of their own
        run(still_larger, "larger-still")


def test_what_does_not_go_with_own_components_is_refused(raw):
    sampled = online(raw, Path())
    with pytest.raises(ConfigError, match=r"model\.head.*rollouts are sampled"):
        job_of(sampled, model__head={"use": "tests.model.own:DeepHead"})
    with pytest.raises(ConfigError, match=r"rollout\.engine.*vllm does not know"):
        job_of(sampled, model__replace=NARROW, rollout__engine="vllm")
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        run(job_of(raw, model__replace={"layers.*.mlp": {"use": "tests.nowhere:MLP"}}), "nowhere")
    with pytest.raises(UserError, match=r"model\.replace: layers\.9\.mlp matches nothing"):
        run(job_of(raw, model__replace={"layers.9.mlp": {"use": "tests.model.own:SameMLP"}}), "beyond")


def test_rollouts_come_from_the_same_components_and_tokens(raw, tmp_path):
    """The policy, the reference and the native engine agree on a model whose layers and tokens are the user's own,
    before and after syncs."""
    sampled = online(raw, tmp_path, "tests.rl.plugs:varied") | {"algo": {"kl_coef": 0.01}}
    sampled["model"] = {**raw["model"], "replace": NARROW, "tokens": {"added": ["<x>", *codes(50)]}}
    found = run(job_of(sampled, train__steps=3), "online")
    rows = read_metrics(found / "metrics.jsonl")
    assert all(r["logprob_diff_max"] <= 1e-5 and r["canary_logprob_diff_max"] <= 1e-5 for r in rows)
    assert rows[0]["kl_reference"] < 1e-9 < rows[-1]["kl_reference"]
    assert (found / "model" / "components.safetensors").is_file()
    assert len(weights(found)["model.embed_tokens.weight"]) == 21 + 51


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"replace": NARROW},
        {"head": {"use": "tests.model.own:DeepHead", "args": {"width": 40}}},
        {"backend": "hf", "init": "pretrained"},
        {"lora": {"rank": 4}},
        {"tokens": {"added": ["<x>", *codes(50)]}},
    ],
    ids=["plain", "component", "head", "transformers", "lora", "tokens"],
)
def test_the_evaluate_stage_measures_what_training_measured_last_and_what_it_began_with(raw, tmp_path, model):
    if model.get("backend"):
        checkpoint(tmp_path / "model", vocab_size=Tokenizer.load(str(tmp_path / "model")).vocab_size)
    raw["train"] |= {"validate_every": 2, "steps": 4, "precision": "fp32"}
    job = job_of(raw | {"model": {**raw["model"], **model}})
    directory = run(job, "run")
    found, rows = measure_run(job, directory), read_metrics(directory / "metrics.jsonl")
    assert found.keys() == {"loss/held_out", "starting_model/loss/held_out"}
    assert found["loss/held_out"] == pytest.approx(rows[-1]["loss/held_out"], abs=1e-4)
    assert found["starting_model/loss/held_out"] > found["loss/held_out"]
