"""Whole runs with vLLM on Ray, however the weights reach it."""

import pytest

from ptf.compute.tracking import read_metrics
from tests.rl.test_controller import raw, train  # noqa: F401

TWO = {"training": {"roles": ["policy", "reference"]}, "generating": {"roles": ["rollout"]}}
LORA = {"rank": 4, "alpha": 8}


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("sent", "pools", "model"),
    [({"transport": "ipc"}, {}, {}), ({"transport": "nccl"}, TWO, {}), ({"lora": "adapter", "transport": "path"}, {}, {"lora": LORA})],
    ids=["ipc", "nccl", "an adapter"],
)
def test_policy_and_engine_stay_one_policy(raw, ray_cluster, sent, pools, model):  # noqa: F811
    raw = {**raw, "algo": {"kl": 0.01}, "model": {**raw["model"], **model}, "rollout": {**raw["rollout"], "engine": "vllm", **sent}}
    raw["train"] = {**raw["train"], "steps": 4}
    raw["compute"] = {"launcher": "ray", "device": "cpu", "workers": 1, "threads": 1, "pools": pools}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(max(row["logprob_diff"], row["canary_diff"]) for row in rows) <= 1e-5
    assert len({row["reward"] for row in rows}) > 1 or rows[0]["kl_reference"] < rows[-1]["kl_reference"], "it trains"
