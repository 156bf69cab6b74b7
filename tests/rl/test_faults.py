"""Whatever goes wrong in an engine or a trainer is named, and the run ends with the weights of one in which nothing
did."""

import pytest

from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_controller import train
from tests.rl.test_pools import left

FAULTS = ["raise", "SIGKILL", "garbage", "SIGSTOP", "hang"]
SAID = {
    "raise": "out of order",
    "SIGKILL": "died while doing",
    "SIGSTOP": "has not answered for",
    "hang": "did not finish",
}


@pytest.fixture
def job(raw):
    raw = {**raw, "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 8}, "checkpoint": {"every": 1}}
    raw["train"] = {**raw["train"], "steps": 6, "deterministic": True, "validate_every": 0}
    raw.pop("evaluate")
    return raw


def on_ray(job: dict, timeout_s: float) -> dict:
    return {**job, "compute": {"launcher": "ray", "device": "cpu", "threads": 1, "timeout_s": timeout_s}}


@pytest.mark.cluster
def test_faults_of_an_engine_change_nothing(job, tmp_path, ray_cluster, capfd):
    job["algo"] = {"num_minibatches": 2, "kl_coef": 0.01}
    want = left(train(job, "whole"))
    engine = {"use": "tests.rl.faulty:Engine", "args": {"place": str(tmp_path), "faults": FAULTS}}
    made = left(train(on_ray({**job, "rollout": {**job["rollout"], "engine": engine}}, 25.0), "faulty"))
    assert len(list(tmp_path.glob("engine-*"))) == len(FAULTS), "every fault was there"
    assert made["samples"] == want["samples"], "no fault became a reward, and nothing was sampled twice"
    assert made["weights"] == want["weights"]
    said = capfd.readouterr().out
    assert said.count("failed at rollout and is replaced") == len(FAULTS)
    for fault, words in {**SAID, "garbage": "log-probs that are not numbers"}.items():
        assert words in said, fault


@pytest.mark.cluster
def test_faults_of_a_trainer_change_nothing(job, tmp_path, ray_cluster, capfd):
    recipe = {"use": "tests.rl.faulty:Recipe", "args": {"place": str(tmp_path), "faults": []}}
    job["algo"], job["recipe"], job["train"]["steps"] = {"num_minibatches": 2}, recipe, 7
    want = left(train(job, "whole"))
    job["recipe"] = {**recipe, "args": {**recipe["args"], "faults": FAULTS}}
    made = left(train(on_ray(job, 25.0), "faulty"))
    assert len(list(tmp_path.glob("learner-*"))) == len(FAULTS), "every fault was there"
    assert made["samples"] == want["samples"]
    assert made["weights"] == want["weights"]
    said = capfd.readouterr().out
    assert said.count("started again from step") == len(FAULTS)
    for fault, words in {**SAID, "garbage": "gradient norm nan"}.items():
        assert words in said, fault


@pytest.mark.cluster
@pytest.mark.parametrize(("fault", "sending"), [("SIGKILL", ""), ("raise", ""), ("", "SIGKILL"), ("", "raise")])
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_weights_whose_way_is_cut_are_sent_again(job, tmp_path, ray_cluster, capfd, transport, fault, sending):
    """All roles go on from the checkpoint, long before the deadline, and whoever failed is named."""
    job["train"]["steps"] = 4
    plugin = {"use": "tests.rl.faulty:Reading", "args": {"place": str(tmp_path), "fault": "", "sending": ""}}
    job["model"] = {**job["model"], "replace": {"layers.0.mlp": plugin}}
    want = left(train(job, "whole"))
    plugin["args"] |= {"fault": fault, "sending": sending}
    faulty = on_ray(job, 300.0)
    faulty["rollout"] = {**job["rollout"], "transport": transport}
    if transport == "nccl":
        faulty["compute"]["pools"] = {"training": {"roles": ["policy"]}, "generating": {"roles": ["rollout"]}}
    made = left(train(faulty, "faulty"))
    assert len(list(tmp_path.glob("*ing"))) == 1
    assert made["samples"] == want["samples"]
    assert made["weights"] == want["weights"]
    said = capfd.readouterr().out
    assert said.count("started again from step 2 ") == 1
    assert ("died while doing" if "SIGKILL" in (fault, sending) else "out of order") in said
    assert f"{'rollout' if fault else 'policy'} rank 0" in said.split("started again")[0]
    assert "after 300 s" not in said, "nobody waited for the deadline"
