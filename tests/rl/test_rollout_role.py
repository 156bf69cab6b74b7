"""What an engine is given, by its name."""

import json

import pytest
import yaml

from ptf.config import Job, loads
from ptf.errors import UserError
from ptf.rl.rollout_role import _engine_options, rollout_options, sampler_spec
from ptf.tasks.tiny import write_model


def job(**sections) -> Job:
    raw = {
        "recipe": "grpo",
        "model": {"path": "m", **sections.pop("model", {})},
        "data": {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}},
        "train": {"steps": 1, "lr": 1e-4},
        "rollout": {"reward": {"use": "ptf.rl.rewards:exact"}, "gpu_memory_utilization": 0.4},
    }
    return loads(yaml.safe_dump(raw | sections))


def test_an_engine_is_given_what_it_takes_and_nothing_else():
    lora = job(model={"lora": {"rank": 4}})
    assert _engine_options(lora, "native", None, adapter=False, tensor_parallel_size=1) == {
        "spec": lora.model,
    }
    assert _engine_options(lora, "native", None, adapter=True, tensor_parallel_size=1) == {
        "spec": lora.model,
        "adapted": True,
    }
    found = _engine_options(lora, "vllm", None, adapter=True, tensor_parallel_size=2)
    assert found.keys() & {"spec", "adapted"} == set()
    assert found["lora_rank"] == 4
    assert found["gpu_share"] == 0.4
    assert "lora_rank" not in _engine_options(lora, "vllm", None, adapter=False, tensor_parallel_size=1)
    assert "constrained_decoding" not in found


def test_the_limits_of_environments_are_those_of_rewards():
    limits = {"reward_processes": 2, "reward_timeout_s": 7, "reward_retries": 3}
    made = job(rollout={"environment": {"use": "tests.rl.environments:Echo"}, **limits})
    spec = rollout_options(made, None)["environments"][""]
    assert (spec.processes, spec.timeout_s, spec.retries) == (2, 7, 3)


def test_a_cache_on_a_cpu_holds_several_of_the_longest_contexts(tmp_path):
    write_model(tmp_path, "abc")
    file = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 28, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes | {"max_position_embeddings": 4096}))
    made = job(train={"steps": 1, "lr": 1e-4, "precision": "bf16"})
    few = {"engine": "vllm", "for_training": True, "engines": 1}
    caches = [
        sampler_spec(made, tmp_path, str(tmp_path), tmp_path, length=length, **few).kwargs["cpu_kv_cache_gib"]
        for length in (64, 4096)
    ]
    assert caches == [0.25, 4 * 4096 * 28 * 8 * 256 * 2 / 2**30]


def test_a_model_that_an_engine_cannot_hold_is_refused_before_one_starts(tmp_path):
    write_model(tmp_path, "abc")
    positions = json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]

    def spec(length: int, processes: int):
        return sampler_spec(
            job(),
            tmp_path,
            str(tmp_path),
            tmp_path,
            engine="native",
            for_training=True,
            engines=1,
            length=length,
            tensor_parallel_size=processes,
        )

    assert spec(positions, 1).workers == 1
    with pytest.raises(UserError, match=f"take {positions + 1} tokens together, but .* has {positions} positions"):
        spec(positions + 1, 1)
    with pytest.raises(UserError, match="attention heads cannot be divided among 3 processes"):
        spec(positions, 3)
