"""Whole runs with vLLM on Ray, however many processes hold an engine, and however the weights reach it."""

from pathlib import Path
from typing import Any

import pytest

from ptf.compute.tracking import read_metrics
from ptf.errors import UserError
from tests.rl.test_controller import raw, train  # noqa: F401
from tests.tiny import read_jsonl

APART = {"training": {"roles": ["policy", "reference"]}, "generating": {"roles": ["rollout"]}}
APART_POLICY = {"training": {"roles": ["policy"]}, "generating": {"roles": ["rollout"]}}
DECIDED = ("reward", "staleness", "staleness_max", "groups_in_flight", "slices", "sampled_tokens")  # by what is sampled
LORA = {"rank": 4, "alpha": 8}
RUNS = {
    "ipc": ({"transport": "ipc"}, {}, {}),
    "nccl": ({"transport": "nccl"}, {"pools": APART}, {}),
    "an adapter": ({"lora_sync": "adapter", "transport": "files"}, {}, {"lora": LORA}),
    "two processes": ({"tensor_parallel_size": 2}, {}, {}),
    "two processes, ipc": ({"tensor_parallel_size": 2, "transport": "ipc"}, {"workers": 2}, {}),
    "two processes, nccl": ({"tensor_parallel_size": 2, "transport": "nccl"}, {"pools": APART}, {}),
}


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.parametrize("kind", RUNS)
def test_policy_and_engine_stay_one_policy(raw, ray_cluster, kind):  # noqa: F811
    rollout, compute, model = RUNS[kind]
    raw = {
        **raw,
        "algo": {"kl_coef": 0.01},
        "model": {**raw["model"], **model},
        "rollout": {**raw["rollout"], "engine": "vllm", **rollout},
    }
    raw["train"] = {**raw["train"], "steps": 4}
    raw["compute"] = {"launcher": "ray", "device": "cpu", "workers": 1, "threads": 1, **compute}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(max(row["logprob_diff_max"], row["canary_logprob_diff_max"]) for row in rows) <= 1e-5
    assert rows[0]["kl_reference"] == 0 < rows[-1]["kl_reference"], "it trains"


@pytest.mark.ray
@pytest.mark.cluster
def test_heads_that_cannot_be_shared_are_said_before_an_engine_starts(raw, ray_cluster):  # noqa: F811
    raw = {
        **raw,
        "rollout": {**raw["rollout"], "engine": "vllm", "tensor_parallel_size": 3},
        "compute": {"launcher": "ray", "device": "cpu", "threads": 1},
    }
    with pytest.raises(
        UserError, match=r"rollout.tensor_parallel_size: 4 attention heads cannot be divided among 3 processes"
    ):
        train(raw)


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.parametrize("staleness", [1, 4])
def test_asynchronous_rollouts_sample_the_same_tokens_again(raw, ray_cluster, staleness):  # noqa: F811
    """What is promised of vLLM: equal tokens, versions and batches, and log-probs within 1e-5 in fp32."""
    flight = {"max_staleness": staleness, "slice_tokens": 2, "in_flight": 12}
    raw = {**raw, "rollout": {**raw["rollout"], "engine": "vllm", **flight}}
    raw["train"] = {**raw["train"], "steps": 5, "validate_every": 0}
    raw["track"] = {"samples_every": 1, "sample_prompts": 8, "tensorboard": False}
    raw["compute"] = {"launcher": "ray", "device": "cpu", "workers": 1, "threads": 1, "pools": APART_POLICY}
    runs = [train(raw, name) for name in ("once", "again")]
    rows = [read_metrics(run / "metrics.jsonl") for run in runs]
    assert max(row["staleness_max"] for row in rows[0]) > 0, "something was sampled by earlier weights"
    compared = [row for row in rows[0] if "logprob_diff_max" in row]
    assert compared
    assert max(max(row["logprob_diff_max"], row["canary_logprob_diff_max"]) for row in compared) <= 1e-5
    assert sampled(runs[0]) == sampled(runs[1])
    for one, other in zip(*rows, strict=True):
        assert {key: one[key] for key in DECIDED} == {key: other[key] for key in DECIDED}


def sampled(run: Path) -> list[tuple[Any, ...]]:
    """Return the responses of the log, with their rewards."""
    rows = read_jsonl(run / "samples.jsonl")
    assert len(rows) >= 5 * 8
    return [(row["step"], row["response"], row["reward"]) for row in rows]
