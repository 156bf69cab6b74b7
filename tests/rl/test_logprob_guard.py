"""The guard over log-probs stops at faults and not at rounding, whatever the number of tokens."""

import re

import numpy as np
import pytest
import torch
import yaml

from ptf.config import frozen_differences, loads
from ptf.config.logprob_limits import LIMITS_WITH_EXPERTS, LOGPROB_LIMITS, logprob_limits
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.model.chunked import TokenLogprobs
from ptf.recipes import registry
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl.weights.verification import LogprobDifference, SyncError
from tests.recipes.of_keys import of_keys

BF16, FP32 = LOGPROB_LIMITS["bf16"], LOGPROB_LIMITS["fp32"]
EXPERTS = LIMITS_WITH_EXPERTS["fp32"]
JOB = {
    "recipe": "grpo",
    "model": {"path": "m"},
    "data": {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}, "seq_len": 64},
    "rollout": {"engine": "native", "reward": {"use": "a:b"}, "max_new_tokens": 8},
    "train": {"steps": 2, "lr": 1e-4, "precision": "bf16"},
    "compute": {"launcher": "local"},
}


def rounding(tokens: int, scale: float) -> np.ndarray:
    """Differences with heavy tails: few tokens are much more uncertain than the others."""
    rng = np.random.default_rng(0)
    return np.abs(rng.normal(0, 1, tokens) * rng.lognormal(np.log(scale), 1.2, tokens)).astype(np.float32)


def refused(differences: np.ndarray, limits) -> str | None:
    try:
        LogprobDifference.of(differences, limits.threshold).raise_if_beyond(limits, "log-probs")
    except SyncError as error:
        return str(error)
    return None


@pytest.mark.parametrize("tokens", [1_000, 1_000_000])
def test_rounding_in_bf16_stops_nothing_whatever_the_number_of_tokens(tokens):
    differences = rounding(tokens, 0.02)
    assert differences.max() > 0.2  # which a bound on the largest would refuse
    assert refused(differences, BF16) is None


@pytest.mark.parametrize(
    ("differences", "limits", "said"),
    [
        (
            np.full(1000, 0.21),
            BF16,
            "0.21 on average over 1000 tokens (the limit is 0.2, by rollout.logprob_tolerance)",
        ),
        (
            np.where(np.arange(1000) < 100, 0.6, 0.0),
            BF16,
            "0.5 (by rollout.logprob_tolerance) for 10.000% of",
        ),
        (
            np.where(np.arange(10**6) < 1, 2e-3, 0.0),
            FP32,
            "0.001 (by rollout.logprob_tolerance) for 0.000%",
        ),
        (np.full(1000, 2e-4), FP32, "the limit is 0.0001, by"),
        (np.where(np.arange(1000) < 1, np.nan, 0.0), BF16, "differ by nan on average"),
    ],
)
def test_what_is_not_rounding_is_refused(differences, limits, said):
    assert re.search(re.escape(said), refused(differences, limits) or "")


def test_in_bf16_one_token_of_a_short_text_is_not_a_share():
    assert refused(np.where(np.arange(30) < 1, 0.6, 0.0), BF16) is None
    assert refused(np.where(np.arange(30) < 6, 0.6, 0.0), BF16) is not None


def test_in_fp32_one_token_whose_experts_changed_is_no_fault_in_a_model_with_experts():
    apart, wrong = np.where(np.arange(1000) < 1, 0.39, 2e-6), np.full(1000, 3e-3)
    assert refused(apart, FP32) is not None
    assert refused(apart, EXPERTS) is None
    assert refused(wrong, EXPERTS) is not None


@pytest.mark.parametrize(
    ("precision", "experts", "default"),
    [("bf16", False, BF16), ("fp32", False, FP32), ("bf16", True, BF16), ("fp32", True, EXPERTS)],
)
def test_the_tolerance_is_a_factor_on_the_differences_and_not_on_the_share(precision, experts, default):
    def limits(**keys: float):
        rollout, train = {**JOB["rollout"], **keys}, {**JOB["train"], "precision": precision}
        job = loads(yaml.safe_dump({**JOB, "rollout": rollout, "train": train}))
        return logprob_limits(job, experts=experts)

    assert limits() == default
    assert limits(logprob_tolerance=2.0) == (2 * default.mean, 2 * default.threshold, default.share)


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "episode_mean", "constant_length"])
def test_a_loss_reports_means_whatever_it_is_itself_a_mean_over(loss_aggregation):
    samples = [Document(np.arange(n, dtype=np.int32), np.r_[0.0, np.ones(n - 1)].astype(np.float32)) for n in (5, 9)]
    batch = Batch.of([[(sample,) for sample in samples]], 16)
    recipe = of_keys(GRPO, loss_aggregation=loss_aggregation, max_new_tokens=100, logprob_diff_threshold=0.25)
    engine = torch.zeros_like(batch.loss_weights)
    batch.token_columns["rollout_logprobs"] = engine
    off = torch.where(batch.loss_weights != 0, 0.25, 0.0)
    off[0, 0] = 0.5  # of the first answer's four tokens
    found = recipe.logprob_differences(TokenLogprobs(off, off, torch.zeros_like(off)), batch)
    units = float(recipe.denominator(batch))
    share = 1 / 12 if loss_aggregation == "token_mean" else 1 / 4 / 2
    assert float(found["logprob_diff_mean"]) / units == pytest.approx(0.25 + 0.25 * share)
    assert float(found["logprob_diff_share"]) / units == pytest.approx(share)
    assert float(found["logprob_diff_max"]) == 0.5


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "opd"])
@pytest.mark.parametrize(
    ("precision", "key", "used"),
    [
        ("bf16", {}, 2.0),
        ("fp32", {}, None),
        ("bf16", {"tis_cap": None}, None),
        ("fp32", {"tis_cap": 3.0}, 3),
    ],
)
def test_importance_weights_are_used_in_bf16_unless_a_job_says_otherwise(recipe, precision, key, used):
    algo = key | ({"teacher": "t"} if recipe == "opd" else {})
    job = loads(
        yaml.safe_dump(JOB | {"recipe": recipe, "algo": algo, "train": {**JOB["train"], "precision": precision}})
    )
    built = registry.build(job)
    assert built.tis_cap == used
    assert built.context.logprob_diff_threshold == LOGPROB_LIMITS[precision].threshold


def test_a_run_in_fp32_that_began_without_importance_weights_is_resumed():
    def job(precision: str, **algo: object):
        return loads(yaml.safe_dump(JOB | {"algo": algo, "train": {**JOB["train"], "precision": precision}}))

    assert frozen_differences(job("fp32", tis_cap=None), job("fp32")) == []
    assert frozen_differences(job("bf16", tis_cap=None), job("bf16")) == ["algo.tis_cap: null → 2.0"]
