"""Recipes that compare answers or models, as whole runs: everything that SFT promises holds for them,
by the same loop."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from ptf.compute.lease import UNSHARED
from ptf.config import loads
from ptf.config.sections.compute import MeshSizes
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.train.loop import train_offline
from ptf.train.tokenize import tokenize
from tests.model.ranks import two_ranks, world_of
from tests.tiny import arithmetic, checkpoint, write_jsonl
from tests.train.test_loop import facts, resumed_alike, same, stopped, train, weights

RECIPES = {
    "dpo": {"recipe": "dpo", "algo": {"beta": 0.5}},
    "rm": {"recipe": "rm", "algo": {"center_coef": 0.01}},
    "scores": {"recipe": "rm", "algo": {"loss_type": "binary"}},
    "kd": {"recipe": "kd", "algo": {"loss_type": "js", "ce_coef": 0.5}},
    "dpo ahead": {"recipe": "dpo", "algo": {"beta": 0.5, "precompute": True}},
    "kd ahead": {"recipe": "kd", "algo": {"top_k": 3, "precompute": True}},
}


def preferences(directory: Path, name: str) -> dict[str, Any]:
    """Return a raw job. Depending on its name, the right sum is preferred to a wrong one, answers have scores of 1
    and 0, or the right sums are distilled from a wider teacher."""
    raw = {**arithmetic(directory), **RECIPES[name]}
    if raw["recipe"] == "kd":
        teacher = checkpoint(
            directory / "teacher", vocab_size=Tokenizer.load(raw["model"]["path"]).vocab_size, hidden_size=96, seed=7
        )
        Tokenizer.load(raw["model"]["path"]).save(teacher)
        return {**raw, "algo": {**raw["algo"], "teachers": {"wide": {"path": str(teacher)}}}}
    sums = np.random.default_rng(5).integers(1, 30, (80, 2)).tolist()
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    scored = [
        {"prompt": p["prompt"], "completion": p[k], "reward": float(k == "chosen")}
        for p in pairs
        for k in ("chosen", "rejected")
    ]
    rows = scored if name == "scores" else pairs
    write_jsonl(directory / "train.jsonl", rows[: len(rows) // 2])
    write_jsonl(directory / "held_out.jsonl", rows[len(rows) // 2 :])
    return raw


@pytest.fixture(params=list(RECIPES))
def raw(request, tmp_path) -> dict[str, Any]:
    return preferences(tmp_path, request.param)


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_bits(raw, monkeypatch):
    whole, _ = resumed_alike(raw, monkeypatch, 7)
    last = facts(whole)[-1]
    assert {"loss/held_out", "divergence/held_out" if raw["recipe"] == "kd" else "accuracy/held_out"} <= last.keys()
    assert 0 <= last.get("accuracy/held_out", 0) <= 1


@pytest.mark.long
def test_how_sequences_are_split_changes_no_bit_in_the_deterministic_mode(raw):
    if raw["algo"].get("precompute"):
        with pytest.raises(UserError, match=r"algo\.precompute .*because the last bits of precomputed values depend"):
            train(raw, "refused", train__deterministic=True)
        return
    one, other = (train(raw, f"split-{n}", train__micro_batch_sequences=n, train__deterministic=True) for n in (1, 4))
    assert facts(one) == facts(other)
    assert same(weights(one), weights(other))


@pytest.mark.parametrize("mesh", [{}, {"tensor_parallel_size": 2}], ids=["sharded", "tensor"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "scores"])
@pytest.mark.cluster
def test_two_workers_train_what_one_does(tmp_path, name, mesh):
    """Two workers add in another order. How far that may move a run is measured: one worker from weights that are a
    rounding away from the same start."""
    raw = preferences(tmp_path, name)
    tokenizer = Tokenizer.load(raw["model"]["path"])
    start, near = (checkpoint(tmp_path / place, vocab_size=tokenizer.vocab_size) for place in ("start", "near"))
    perturb(near / "model.safetensors")
    for directory in (start, near):
        tokenizer.save(directory)
    alone, moved = (facts(train({**raw, "model": {"path": str(path)}}, path.name)) for path in (start, near))
    shutil.rmtree(tmp_path / "runs" / "precomputed", ignore_errors=True)  # two find for themselves
    compute = {**raw["compute"], "launcher": "torchrun", "workers": 2, "mesh": mesh}
    both = facts(train({**raw, "model": {"path": str(start)}, "compute": compute}, "both"))
    pair = "divergence" if raw["recipe"] == "kd" else "margin"
    for key in ("loss", "grad_norm", pair):
        one, near_one, two = (np.array([row[key] for row in rows]) for rows in (alone, moved, both))
        allowed = 1e-6 + 10 * np.abs(near_one - one).max()
        assert allowed < 1e-3 * np.abs(one).max(), f"{key}: a bound that large would show nothing"
        assert np.abs(two - one).max() <= allowed, key
    for key in ("loss_denominator", *(() if raw["recipe"] == "kd" else ("accuracy",))):
        assert [row[key] for row in both] == pytest.approx([row[key] for row in alone], rel=1e-6), key


def perturb(path: Path) -> None:
    """Change every weight of a file by about one rounding of fp32."""
    random = torch.Generator().manual_seed(0)
    near = {k: v * (1 + 1e-7 * torch.randn(v.shape, generator=random)) for k, v in load_file(path).items()}
    save_file(near, path, metadata={"format": "pt"})


@pytest.mark.long
def test_adapters_make_a_policy_its_own_reference(tmp_path):
    """The run begins at ln 2, as it must whatever the reference is, and goes as with a second model."""
    raw = preferences(tmp_path, "dpo")
    sources = raw["data"]["sources"] | {"sums": completions(tmp_path)}
    data = raw["data"] | {"sources": sources, "validation": {}}
    start = train({**raw, "recipe": "sft", "algo": {}, "data": data}, "start")
    raw["model"] = {"path": str(start / "model"), "lora": {"rank": 4}}
    own = train(raw, "own")
    second = train({**raw, "algo": raw["algo"] | {"reference": str(start / "model")}}, "second")
    assert facts(own)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert [row["loss"] for row in facts(own)] == pytest.approx([row["loss"] for row in facts(second)], abs=1e-5)
    assert abs(facts(own)[-1]["loss"] - math.log(2)) > 1e-3


def completions(directory: Path) -> dict[str, str]:
    rows = [{"prompt": f"{a}+{a}=", "completion": str(2 * a)} for a in range(1, 40)]
    return {"path": str(write_jsonl(directory / "completions.jsonl", rows))}


def test_a_reference_of_another_architecture_or_tokenizer_is_refused(tmp_path):
    raw = preferences(tmp_path, "dpo")
    other = checkpoint(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(
        UserError,
        match=r"reference: the model in .*other has another architecture than the model that is trained: vocab, "
        r"layers differ",
    ):
        train({**raw, "algo": {"reference": str(other)}}, "a")
    character_tokenizer("abc", other)
    with pytest.raises(
        UserError, match=r"reference: the model in .*other has another tokenizer than the model that is trained"
    ):
        train({**raw, "algo": {"reference": str(other)}}, "b")
    with pytest.raises(UserError, match=r"reference: there is no directory nowhere"):
        train({**raw, "algo": {"reference": "nowhere"}}, "c")


def test_a_teacher_of_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    raw = preferences(tmp_path, "kd")
    other = checkpoint(tmp_path / "other")
    taught = {**raw, "algo": {"teachers": {"big": {"path": str(other)}}}}
    with pytest.raises(
        UserError, match=r"big: .*other has no tokenizer, and 97 vocabulary rows where the model has \d+"
    ):
        train(taught, "a")
    character_tokenizer("abc", other)
    with pytest.raises(
        UserError, match=r"big: the model in .*other has another tokenizer than the model that is trained"
    ):
        train(taught, "b")


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", "kd"])
def test_what_was_found_ahead_trains_what_is_found_beside(tmp_path, name, capsys):
    """The log-probs of reference or teacher are computed before training or beside it; the batches and losses are
    the same. A second run computes none again; with a different model or data they are computed anew."""
    raw = preferences(tmp_path, f"{name} ahead")
    beside = train({**raw, "algo": raw["algo"] | {"precompute": False}}, "beside")
    capsys.readouterr()
    ahead = train(raw, "ahead")
    assert capsys.readouterr().out.count("precompute: ") == 2, "sums and held_out"
    assert [row["loss"] for row in facts(ahead)] == pytest.approx([row["loss"] for row in facts(beside)], rel=1e-5)
    assert [row["tokens"] for row in facts(ahead)] == [row["tokens"] for row in facts(beside)]
    train(raw, "again")
    assert "precompute: " not in capsys.readouterr().out
    train({**raw, "seed": 2, "train": raw["train"] | {"steps": 1}}, "other")
    anew = capsys.readouterr().out.count("precompute: ")
    assert anew == (2 if name == "dpo" else 0), (
        "another seed draws another model to start from, but asks the same teacher"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", "kd"])
def test_what_was_found_ahead_by_sharded_models_in_bf16_is_what_they_find_beside(tmp_path, name):
    raw = preferences(tmp_path, f"{name} ahead")
    if name == "dpo":
        raw["algo"] = raw["algo"] | {
            "reference": str(train({**raw, "algo": {}}, "reference", train__steps=1) / "model")
        }
    ahead, beside = (
        train({**raw, "algo": raw["algo"] | {"precompute": on}}, str(on), train__precision="bf16", train__steps=4)
        for on in (True, False)
    )
    assert [row["loss"] for row in facts(ahead)] == pytest.approx([row["loss"] for row in facts(beside)], rel=0.02)
    assert (tmp_path / "runs" / "precomputed").is_dir()


def test_a_limit_holds_for_what_is_found_ahead(tmp_path):
    """The limit of a source also applies to log-probs computed before training, if the data were tokenized without
    one."""
    raw = preferences(tmp_path, "dpo ahead")

    made = tokenize(loads(yaml.safe_dump(raw)), Tokenizer.load(raw["model"]["path"]), 1)
    few = {"path": made["sums"], "kind": "tokenized", "limit": 3, "epochs": 1}
    raw["data"] |= {"sources": {"sums": few}, "validation": {}, "partitions": 1}
    rows = facts(
        train(raw, "a", train__steps=None, train__epochs=1, train__global_batch_sequences=1, train__validate_every=0)
    )
    assert sum(row["loss_denominator"] for row in rows) == 3


def train_on_rank(text: str, directory: Path) -> None:
    """Train as one of two ranks, as each of them does under torchrun."""
    train_offline(loads(text), world_of(MeshSizes(shard=2)), directory, UNSHARED)


@pytest.mark.parametrize("workers", [1, 2])
def test_partitions_that_end_before_others_train_nothing(tmp_path, workers):
    """This includes steps in which a rank, or every rank, has no sequence left: the padding sequences still have the
    columns that the loss reads."""
    raw = preferences(tmp_path, "scores")
    write_jsonl(
        tmp_path / "train.jsonl",
        [{"prompt": f"{i}+1=", "completion": str(i + 1), "reward": float(i % 2)} for i in range(9)],
    )
    raw["data"] |= {"partitions": 8, "seq_len": 16, "validation": {}}
    raw["train"] |= {"steps": None, "epochs": 1, "global_batch_sequences": 2, "validate_every": 0}
    if workers == 1:
        directory = train(raw, "a")
    else:
        raw["compute"] |= {"launcher": "torchrun", "workers": 2}
        directory = tmp_path / "both"
        two_ranks(partial(train_on_rank, yaml.safe_dump(raw), directory), tmp_path)
    rows = facts(directory)
    assert sum(row["loss_denominator"] for row in rows) == 9
    assert [row["loss_denominator"] for row in rows] == [2, 2, 2, 2, 1]


def test_the_reference_that_was_found_ahead_is_where_training_began(tmp_path, monkeypatch):
    """The reference is the model before training, also if its stored log-probs were deleted before the run is
    resumed."""
    raw = preferences(tmp_path, "dpo ahead")
    whole = train(raw, "whole")
    assert facts(whole)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    stopped(monkeypatch, 7, lambda: train(raw, "stopped"))
    shutil.rmtree(tmp_path / "runs" / "precomputed")
    assert same(weights(whole), weights(train(raw, "stopped")))


def test_a_pair_that_does_not_fit_a_row_is_refused(tmp_path):
    raw = preferences(tmp_path, "dpo")
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+1=", "chosen": "2" * 40, "rejected": "3" * 40}])
    with pytest.raises(UserError, match=r"tokens do not fit data\.seq_len 64"):
        train(raw, "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recipe": "dpo", "algo": {"loss_type": "simpo", "reference": "x"}},
            r"algo\.reference +simpo has no reference",
        ),
        (
            {"recipe": "dpo", "algo": {"loss_type": "ipo", "label_smoothing": 0.1}},
            r"algo\.label_smoothing +belongs to algo\.loss_type: sigmoid",
        ),
        (
            {"recipe": "dpo", "algo": {"gamma": 0.3}},
            r"algo\.gamma +belongs to algo\.loss_type: simpo, not to sigmoid",
        ),
        (
            {"recipe": "rm", "algo": {"loss_type": "binary", "margin": True}},
            r"algo\.margin +belongs to algo\.loss_type: pair, not to binary",
        ),
        ({"recipe": "rm", "algo": {"beta": 1.0}}, "beta"),
        ({"recipe": "kd", "algo": {}}, r"algo\.teachers"),
        (
            {"recipe": "kd", "algo": {"teachers": {"a": {"path": "m"}}, "beta": 0.3}},
            r"algo\.beta +belongs to algo\.loss_type: js, not to forward",
        ),
        (
            {"recipe": "kd", "algo": {"teachers": {"a": {"path": "m"}}, "precompute": True}},
            r"algo\.precompute +needs algo\.top_k",
        ),
        (
            {"recipe": "dpo", "algo": {"loss_type": "simpo", "precompute": True}},
            r"algo\.precompute +simpo has no reference",
        ),
        (
            {"recipe": "rm", "algo": {}, "data": {"too_long": "truncate"}},
            r"data\.too_long +recipe rm needs whole responses",
        ),
        ({"model": {"path": "m", "replace": {"head": {"use": "a:b"}}}}, r"model\.head +recipe dpo compares log-probs"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, changes, message):
    raw = preferences(tmp_path, "dpo")
    with pytest.raises(UserError, match=message):
        train({**raw, **changes, "data": raw["data"] | changes.get("data", {})}, "a")
