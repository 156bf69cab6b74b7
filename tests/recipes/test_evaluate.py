"""The evaluate stage of recipes that compare or score: the numbers that training saw,
from the files that training left."""

import contextlib
import json

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.artifact import Artifact
from ptf.compute.world import World
from ptf.config import ConfigError, loads
from ptf.config.section import Plugin
from ptf.config.sections.model import ModelConfig
from ptf.data.batch import Batch
from ptf.data.encode import encode_preference
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.evaluate.gate import Worse, check_evaluation
from ptf.evaluate.measurement import auc, calibration_error, compute_own_metric, measure_run
from ptf.publish.publishing import _raise_if_worse
from ptf.recipes.rm.recipe import RM
from ptf.train.trainer import load_model
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, read_jsonl
from tests.train.test_loop import facts, train
from tests.train.test_preferences import RECIPES, preferences


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40).filter(
        lambda xs: 0 < sum(t for _, t in xs) < len(xs)
    )
)
def test_auc_is_the_share_of_pairs_in_the_right_order(found):
    pairs = [(a > b) + (a == b) / 2 for a, true in found if true for b, other in found if not other]
    scores, truth = (np.array(column) for column in zip(*found, strict=True))
    assert auc(scores.astype(float), truth) == pytest.approx(sum(pairs) / len(pairs))


def test_calibration_error_of_what_is_calibrated_and_what_is_not():
    truth = np.array([0.0, 1.0] * 50)
    assert calibration_error(np.full(100, 0.5), truth) == pytest.approx(0)
    assert calibration_error(np.full(100, 0.9), truth) == pytest.approx(0.4)
    assert calibration_error(truth * 0.999, truth) == pytest.approx(0.0005, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", [name for name in RECIPES if "kd" not in name])
def test_it_measures_what_the_last_step_of_training_did(tmp_path, name, lora):
    raw = preferences(tmp_path, name)
    if lora:
        raw["model"] |= {"lora": {"rank": 4}, "trainable": ["head"] if "dpo" not in name else None}
    run = train(raw, "run")
    found, last = measure_run(loads(yaml.safe_dump(raw)), run), facts(run)[-1]
    seen = {key: value for key, value in last.items() if key.endswith("/held_out")}
    assert {"loss/held_out", "accuracy/held_out"} <= seen.keys()
    assert {key: found[key] for key in seen} == pytest.approx(seen, abs=1e-5)
    beside = {"scores": {"auc/held_out", "length_baseline_auc/held_out", "calibration_error/held_out"}}.get(
        name, {"length_baseline_accuracy/held_out"}
    )
    start = {
        key.removeprefix("starting_model/"): value for key, value in found.items() if key.startswith("starting_model/")
    }
    assert found.keys() - seen.keys() == beside | {f"starting_model/{key}" for key in start}
    assert all(0 <= found[key] <= 1 for key in beside)
    if "length_baseline_accuracy/held_out" in beside:  # one token is one character; equal lengths count half
        pairs = read_jsonl(tmp_path / "held_out.jsonl")
        longer = [np.sign(len(pair["chosen"]) - len(pair["rejected"])) for pair in pairs]
        assert min(longer) < 0
        assert found["length_baseline_accuracy/held_out"] == pytest.approx((1 + np.mean(longer)) / 2)
    assert start.keys() == {*seen, *beside} - {"length_baseline_accuracy/held_out"}, (
        "the same of what training started from"
    )
    before = measure_run(
        loads(yaml.safe_dump(raw | {"publish": {"gate": "unmeasured"}})),
        train(raw, "unmoved", train__steps=1, train__lr=1e-12),
    )
    assert start == pytest.approx({key: before[key] for key in start}, abs=1e-5 if "scores" not in name else 2e-3)


def test_of_distillation_it_measures_kl_to_the_teacher_and_the_loss_of_the_data(tmp_path):
    """Whatever was trained on, beside the model that training started from."""
    raw = preferences(tmp_path, "kd ahead")
    forward = train(
        {**raw, "algo": {"teachers": raw["algo"]["teachers"], "ce_coef": 1.0}},
        "forward",
        train__steps=1,
        train__lr=1e-12,
        train__validate_every=1,
    )
    start = facts(forward)[-1]
    run = train(raw, "run", train__lr=5e-3)
    found = measure_run(loads(yaml.safe_dump(raw)), run)
    assert found.keys() == {"kl/held_out", "ce/held_out", "starting_model/kl/held_out", "starting_model/ce/held_out"}
    assert found["starting_model/kl/held_out"] == pytest.approx(start["divergence/held_out"], rel=1e-4)
    assert found["starting_model/ce/held_out"] == pytest.approx(start["ce/held_out"], rel=1e-4)
    assert found["kl/held_out"] < 0.9 * found["starting_model/kl/held_out"]
    assert found["kl/held_out"] > facts(run)[-1]["divergence/held_out"], "of three tokens and the rest it is less"


def test_transformers_reads_the_same_scores(tmp_path):
    from transformers import AutoModelForSequenceClassification

    raw = preferences(tmp_path, "rm")
    run = train(raw, "run", train__steps=4)
    tokenizer = Tokenizer.load(str(run / "model"))
    units = encode_preference({"prompt": "3+4=", "chosen": "7", "rejected": "81"}, tokenizer)
    model = load_model(
        run / "model", World(), ModelConfig(path=str(run / "model")), seed=0, precision="fp32", head="scalar"
    )
    ours = of_keys(RM).scores(model, Batch.of([units], 64)).tolist()
    theirs = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    assert theirs.config.num_labels == 1
    said = [float(theirs(torch.tensor(s.tokens[None].astype("int64"))).logits[0, 0]) for s in units[0]]
    assert said == pytest.approx(ours, abs=1e-5)
    assert ours[0] != pytest.approx(ours[1], abs=1e-4)


@pytest.mark.parametrize(
    ("metric", "before", "now", "published"),
    [
        ("auc/dev", 0.5, 0.45, True),
        ("auc/dev", 0.5, 0.39, False),
        ("auc/dev", 0.5, 0.9, True),
        ("kl/dev", 0.5, 0.55, True),
        ("kl/dev", 0.5, 0.61, False),
        ("kl/dev", 0.5, 0.1, True),
        ("kl/dev", 0.5, float("nan"), False),
        ("auc/dev", None, 0.0, True),
    ],
)
def test_what_is_worse_than_what_is_published_is_not_published(tmp_path, metric, before, now, published):
    section = {"metric": metric, "max_regression": 0.1}
    job = loads(yaml.safe_dump(arithmetic(tmp_path) | {"publish": section}))
    there = {"version": "b", "metrics": {} if before is None else {metric: before}}
    with (
        contextlib.nullcontext()
        if published
        else pytest.raises(Worse, match=rf"not published: {metric} is .*: 0\.1 \(publish\.max_regression\)")
    ):
        _raise_if_worse(job, Artifact("a", metrics={metric: now}), there)
    with pytest.raises(UserError, match=rf"publish\.metric: the evaluation has no '{metric}'; it has kl/test"):
        _raise_if_worse(job, Artifact("a", metrics={"kl/test": now}), there)


def longest(answers, at_least=0):
    return max(at_least, *(len(one["response"]) for one in answers))


def broken(answers):
    return {}["no such"]


HERE = "tests.recipes.test_evaluate"


def generating(tmp_path) -> dict:
    raw = arithmetic(tmp_path)
    raw["data"].pop("validation")
    asked = {
        "sources": {"test": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "reward": {"use": "ptf.tasks.arithmetic:exact"},
        "limit": 4,
    }
    return raw | {
        "train": {**raw["train"], "validate_every": 0, "steps": 2},
        "evaluate": asked | {"samples_per_prompt": 1, "max_new_tokens": 4},
    }


def test_a_metric_of_ones_own_is_found_from_all_answers(tmp_path):
    raw = generating(tmp_path)
    raw["evaluate"]["metrics"] = {
        "longest": {"use": f"{HERE}:longest"},
        "at_least": {"use": f"{HERE}:longest", "args": {"at_least": 999}},
    }
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "longest/test"}}))
    check_evaluation(job)
    run = train(raw, "run")
    found = measure_run(job, run)
    answers = [json.loads(line)["response"] for line in (run / "responses" / "test.jsonl").read_text().splitlines()]
    assert found["longest/test"] == max(map(len, answers))
    assert found["at_least/test"] == found["starting_model/at_least/test"] == 999
    assert "starting_model/longest/test" in found


def test_a_metric_of_ones_own_may_not_have_the_name_of_a_held_out_metric(tmp_path):
    raw = generating(tmp_path)
    raw["data"]["validation"] = {"test": raw["data"]["sources"]["sums"]}
    raw["evaluate"] |= {"metrics": {"loss": {"use": f"{HERE}:longest"}}}
    raw["publish"] = {"gate": "unmeasured"}
    with pytest.raises(UserError, match=r"evaluate\.metrics: loss/test is a metric of data\.validation, too"):
        measure_run(loads(yaml.safe_dump(raw)), train(raw, "run"))


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "evaluate.metrics.mine: .*:broken failed: KeyError"), ("json", "is not callable")]
)
def test_a_metric_that_fails_is_named(name, message):
    with pytest.raises((UserError, ConfigError), match=message):
        compute_own_metric("mine", Plugin(use=f"{HERE}:{name}"), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"publish": {"metric": "pas@1/test"}},
            r"publish.metric: the evaluation will have no 'pas@1/test'; it will have greedy_pass_rate/test",
        ),
        (
            {"publish": {"metric": "test/m"}, "evaluate": {"metrics": {"m": {"use": f"{HERE}:longest"}}}},
            r"publish.metric: the evaluation will have no 'test/m'; it will have greedy_pass_rate/test.*, m/test",
        ),
        (
            {"publish": {"metric": "loss/held_out"}},
            r"publish.metric: the evaluation will have no 'loss/held_out'",
        ),
        (
            {"evaluate": {"metrics": {"m": {"use": f"{HERE}:longst"}}}},
            r"evaluate.metrics.m: .*has no 'longst'  \(did you mean longest",
        ),
        ({"evaluate": {"reward": {"use": "nowhere.at:all"}}}, "evaluate.reward: nowhere.at:all: no module 'nowhere'"),
    ],
)
def test_what_the_last_steps_need_is_missed_before_the_first_one_works(tmp_path, changes, message):
    raw = generating(tmp_path)
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values
    with pytest.raises(ConfigError, match=message):
        check_evaluation(loads(yaml.safe_dump(raw)))


def test_metrics_without_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.metrics +needs evaluate\.sources"):
        loads(yaml.safe_dump(arithmetic(tmp_path) | {"evaluate": {"metrics": {"m": {"use": f"{HERE}:longest"}}}}))


def test_calibration_has_ten_intervals():
    """0.905 and 0.985 are in one of ten intervals, and in two of eleven."""
    probabilities, truth = np.array([0.905, 0.985]), np.array([0.0, 1.0])
    assert calibration_error(probabilities, truth) == pytest.approx(0.89 / 2)
