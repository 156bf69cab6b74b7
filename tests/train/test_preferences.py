"""Recipes that compare answers, as whole runs: everything that SFT promises holds for them, by the same loop."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptf.errors import UserError
from tests.tiny import arithmetic, write_jsonl
from tests.train.test_fit import Stopped, facts, same, stop_at, train, weights

RECIPES = {
    "dpo": {"recipe": "dpo", "algo": {"beta": 0.5}},
    "rm": {"recipe": "rm", "algo": {"centring": 0.01}},
    "scores": {"recipe": "rm", "algo": {"loss": "binary"}},
}


def preferences(directory: Path, name: str) -> dict[str, Any]:
    """The right sum is preferred to a wrong one; or answers are scored 1 and 0."""
    raw = {**arithmetic(directory), **RECIPES[name]}
    sums = np.random.default_rng(5).integers(1, 30, (80, 2)).tolist()
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    scored = [{"prompt": p["prompt"], "completion": p[k], "reward": float(k == "chosen")} for p in pairs for k in ("chosen", "rejected")]
    rows = scored if name == "scores" else pairs
    write_jsonl(directory / "train.jsonl", rows[: len(rows) // 2])
    write_jsonl(directory / "held_out.jsonl", rows[len(rows) // 2 :])
    return raw


@pytest.fixture(params=list(RECIPES))
def raw(request, tmp_path) -> dict[str, Any]:
    return preferences(tmp_path, request.param)


def test_a_resumed_run_ends_with_the_same_bits(raw, monkeypatch):
    whole = train(raw, "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stopped):
            train(raw, "stopped")
    resumed = train(raw, "stopped")
    assert same(weights(whole), weights(resumed))
    assert facts(whole) == facts(resumed)
    last = facts(whole)[-1]
    assert {"loss/held_out", "accuracy/held_out"} <= last.keys()
    assert 0 <= last["accuracy/held_out"] <= 1


def test_how_rows_are_split_changes_no_bit_in_the_deterministic_mode(raw):
    one, other = (train(raw, f"split-{n}", train__micro_rows=n, train__deterministic=True) for n in (1, 4))
    assert facts(one) == facts(other)
    assert same(weights(one), weights(other))


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=["sharded", "tensor"])
@pytest.mark.parametrize("name", ["dpo", "rm"])
@pytest.mark.cluster
def test_two_workers_train_what_one_does(tmp_path, name, mesh):
    raw = preferences(tmp_path, name)
    alone, both = train(raw, "alone"), train({**raw, "compute": {**raw["compute"], "launcher": "torchrun", "workers": 2, "mesh": mesh}}, "both")
    for key in ("loss", "grad_norm", "accuracy", "margin", "units"):
        assert [row[key] for row in facts(both)] == pytest.approx([row[key] for row in facts(alone)], rel=1e-4, abs=1e-6), key


def test_adapters_make_a_policy_its_own_reference(tmp_path):
    """The run begins at ln 2, as it must whatever the reference is, and goes as with a second model."""
    raw = preferences(tmp_path, "dpo")
    start = train(
        {**raw, "recipe": "sft", "algo": {}, "data": raw["data"] | {"sources": raw["data"]["sources"] | {"sums": completions(tmp_path)}, "validation": {}}},
        "start",
    )
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
    from ptf.data.tokenizer import character_tokenizer
    from tests.tiny import checkpoint

    raw = preferences(tmp_path, "dpo")
    other = checkpoint(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"the reference in .*other is of another architecture than the model: vocab, kinds differ"):
        train({**raw, "algo": {"reference": str(other)}}, "a")
    character_tokenizer("abc", other)
    with pytest.raises(UserError, match=r"the reference in .*other has another tokenizer than the model"):
        train({**raw, "algo": {"reference": str(other)}}, "b")


def test_a_pair_that_does_not_fit_a_row_is_refused(tmp_path):
    raw = preferences(tmp_path, "dpo")
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+1=", "chosen": "2" * 40, "rejected": "3" * 40}])
    with pytest.raises(UserError, match=r"tokens do not fit data\.seq_len 64"):
        train(raw, "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "dpo", "algo": {"loss": "simpo", "reference": "x"}}, r"algo\.reference +simpo has no reference"),
        ({"recipe": "dpo", "algo": {"loss": "ipo", "label_smoothing": 0.1}}, r"algo\.label_smoothing +belongs to algo\.loss: sigmoid"),
        ({"recipe": "rm", "algo": {"loss": "binary", "margin": True}}, r"algo\.margin +belongs to algo\.loss: pair, like algo\.centring, not to binary"),
        ({"recipe": "rm", "algo": {"beta": 1.0}}, "beta"),
        ({"recipe": "rm", "algo": {}, "data": {"too_long": "truncate"}}, r"data\.too_long +recipe rm looks at whole answers"),
        ({"model": {"path": "m", "backend": "hf"}}, r"model\.backend +hf has no recipe dpo"),
        ({"model": {"path": "m", "replace": {"head": {"use": "a:b"}}}}, r"model\.head +dpo compares log-probs"),
    ],
)
def test_knobs_that_do_not_go_together_are_refused(tmp_path, changes, message):
    raw = preferences(tmp_path, "dpo")
    with pytest.raises(UserError, match=message):
        train({**raw, **changes, "data": raw["data"] | changes.get("data", {})}, "a")
