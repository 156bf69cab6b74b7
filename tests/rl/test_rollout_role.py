"""What an engine is given, by its name."""

import json
from pathlib import Path

import pytest
import yaml

from ptf.config import Job, loads
from ptf.errors import UserError
from ptf.rl.episodes import RolloutFunctions
from ptf.rl.rollout_role import sampler_spec
from ptf.rl.sampler import SamplerSettings
from ptf.tasks.tiny import write_model
from tests.tiny import configured


def job(**sections) -> Job:
    raw = {
        "recipe": "grpo",
        "model": {"path": "m", **sections.pop("model", {})},
        "data": {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}},
        "train": {"steps": 1, "lr": 1e-4},
        "rollout": {"reward": {"use": "ptf.rl.rewards:exact"}, "gpu_memory_utilization": 0.4},
    }
    return loads(yaml.safe_dump(raw | sections))


def settings_of(made: Job, place: Path, **more) -> SamplerSettings:
    write_model(place, "abc")
    return sampler_spec(made, place, str(place), place, None, **{"engine": "native", "length": 8, **more}).settings


def test_an_engine_is_given_what_the_job_says(tmp_path):
    lora = job(model={"lora": {"rank": 4}}, train={"steps": 1, "lr": 1e-4, "precision": "fp32"})
    found = settings_of(lora, tmp_path).engine
    assert (found.kind, found.version, found.model) == ("native", 0, lora.model)
    assert (found.cpu_kv_cache_gib, found.gpu_memory_utilization) == (0.25, 0.4)
    assert (found.adapter, found.continuous, found.constrained_decoding) == (False, False, False)
    sent = lora.model_copy(update={"rollout": lora.rollout.model_copy(update={"lora_sync": "adapter"})})
    assert not settings_of(sent, tmp_path).engine.adapter, "an evaluation has the merged model"
    found = settings_of(sent, tmp_path, for_training=True).engine
    assert (found.adapter, found.version) == (True, -1)


def test_the_limits_of_environments_are_those_of_rewards():
    limits = {"reward_processes": 2, "reward_timeout_s": 7, "reward_retries": 3}
    made = job(rollout={"environment": {"use": "tests.rl.environments:Echo"}, **limits})
    functions = RolloutFunctions(None, made.rollout)  # pyright: ignore[reportArgumentType]
    (environments,) = functions.environments
    assert [one.timeout_s for one in environments.processes] == [7, 7]
    assert environments.retries == 3
    functions.close()


def test_a_cache_on_a_cpu_holds_several_of_the_longest_contexts(tmp_path):
    write_model(tmp_path, "abc")
    sizes = {"num_hidden_layers": 28, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128}
    configured(tmp_path, **sizes, max_position_embeddings=4096)
    made = job(train={"steps": 1, "lr": 1e-4, "precision": "bf16"})
    caches = [
        sampler_spec(
            made, tmp_path, str(tmp_path), tmp_path, None, engine="vllm", length=length, for_training=True
        ).settings.engine.cpu_kv_cache_gib
        for length in (64, 4096)
    ]
    assert caches == [0.25, 4 * 4096 * 28 * 8 * 256 * 2 / 2**30]


def test_a_model_that_an_engine_cannot_hold_is_refused_before_one_starts(tmp_path):
    write_model(tmp_path, "abc")
    positions = json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]

    def spec(length: int, processes: int):
        made = job(rollout={"reward": {"use": "ptf.rl.rewards:exact"}, "tensor_parallel_size": processes})
        return sampler_spec(
            made, tmp_path, str(tmp_path), tmp_path, None, engine="native", length=length, for_training=True
        )

    assert spec(positions, 1).mesh.ranks == 1
    with pytest.raises(UserError, match=f"take {positions + 1} tokens together, but .* has {positions} positions"):
        spec(positions + 1, 1)
    with pytest.raises(UserError, match="attention heads cannot be divided among 3 processes"):
        spec(positions, 3)
