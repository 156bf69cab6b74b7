"""On-policy distillation: the signal is the teacher's, token by token."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads, model_paths
from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.recipes.opd.recipe import OPD
from ptf.run import run
from tests.recipes.of_keys import of_keys
from tests.rl.test_controller import raw as raw
from tests.rl.test_grpo import trajectory
from tests.tiny import checkpoint

TEACHER = of_keys(OPD, teacher="t")


def test_every_token_is_credited_with_what_the_teacher_thinks_of_it_whatever_the_reward():
    made = [trajectory(i, outcome) for i, outcome in enumerate((Reward(1.0), Reward(0.0), NoResult("away")))]
    columns = [t.token_columns | {"teacher_logprobs": t.token_columns["reference_logprobs"]} for t in made]
    made = [replace(t, token_columns=of) for t, of in zip(made, columns, strict=True)]
    units = TEACHER.compute_advantages([tuple(made)])
    for (sample,), t in zip(units, made, strict=True):
        said = sample.loss_weights != 0
        np.testing.assert_array_equal(
            sample.token_columns["advantages"][said],
            t.token_columns["teacher_logprobs"] - t.token_columns["old_logprobs"],
        )
        assert not sample.token_columns["advantages"][~said].any()


@pytest.fixture
def distilled(raw):
    """A policy from random weights; what its teacher is, each test says."""
    return {
        **raw,
        "recipe": "opd",
        "train": {**raw["train"], "steps": 60, "lr": 3e-3, "validate_every": 0},
        "checkpoint": {"every": 60},
    }


@pytest.mark.cluster
def test_it_comes_nearer_to_its_teacher(distilled, tmp_path):
    """Which SFT made of the same model."""
    taught = {**distilled, "recipe": "sft", "algo": {}, "evaluate": {}}
    taught["data"] = {**taught["data"], "sources": {"sums": {"path": str(tmp_path / "train.jsonl")}}}
    del taught["rollout"]
    distilled["algo"] = {"teacher": str(run(loads(yaml.safe_dump(taught)), "teacher") / "model")}
    rows = read_metrics(run(loads(yaml.safe_dump(distilled)), "a") / "metrics.jsonl")
    apart = [r["kl_teacher"] for r in rows]
    assert np.mean(apart[-5:]) < 0.3 * np.mean(apart[:3])
    assert all(r["logprob_diff_max"] <= 1e-5 for r in rows)
    assert "seconds/teacher" in rows[0]


def test_a_teacher_that_reads_other_tokens_is_refused(distilled, tmp_path):
    stranger = checkpoint(tmp_path / "stranger", vocab_size=55)
    with pytest.raises(UserError, match=r"teacher: .* has no tokenizer"):
        run(loads(yaml.safe_dump({**distilled, "algo": {"teacher": str(stranger)}})), "b")


def test_a_teacher_may_be_what_another_config_publishes(distilled):
    job = loads(yaml.safe_dump({**distilled, "algo": {"teacher": "job:configs/tiny/sft.yaml"}}))
    assert model_paths(job)["algo.teacher"] == "job:configs/tiny/sft.yaml"
