"""Whole runs with vLLM on Ray, however many processes hold an engine, and however the weights reach it."""

import pytest

from ptf.compute.tracking import read_metrics
from ptf.errors import UserError
from tests.rl.test_controller import raw, train  # noqa: F401

APART = {"training": {"roles": ["policy", "reference"]}, "generating": {"roles": ["rollout"]}}
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
