"""Which engine generates held-out answers where `evaluate.engine` is auto."""

from typing import Any

import pytest
import yaml

from ptf.config import Job, Plugin, loads
from ptf.rl.rollout_role import evaluation_engine


def job(engine: Any = "auto", launcher: str = "ray", **model: Any) -> Job:
    raw = {
        "recipe": "sft",
        "model": {"path": "m", **model},
        "data": {"sources": {"a": {"path": "a.jsonl"}}},
        "train": {"steps": 2, "lr": 1e-4},
        "compute": {"launcher": launcher},
        "evaluate": {
            "engine": engine,
            "sources": {"q": {"path": "q.jsonl", "kind": "prompt"}},
            "reward": {"use": "ptf.rl.rewards:exact"},
        },
    }
    return loads(yaml.safe_dump(raw))


REPLACED = {"replace": {"layers.*.mlp": {"use": "a:b"}}}


@pytest.mark.parametrize(
    ("keys", "gpu", "installed", "engine"),
    [
        ({}, True, True, "vllm"),
        ({}, False, True, "native"),
        ({}, True, False, "native"),
        ({"launcher": "local"}, True, True, "native"),
        ({"launcher": "torchrun"}, True, True, "native"),
        (REPLACED, True, True, "native"),
        ({"backend": "hf"}, False, True, "native"),
        ({"backend": "hf"}, True, True, "vllm"),
        ({"engine": "vllm"}, False, False, "vllm"),
        ({"engine": "native"}, True, True, "native"),
        ({"engine": {"use": "a:b"}}, True, True, Plugin(use="a:b")),
    ],
)
def test_the_engine_of_an_evaluation(keys, gpu, installed, engine):
    assert evaluation_engine(job(**keys), gpu, installed) == engine


def test_auto_is_the_default():
    assert Job.model_fields["evaluate"].default.engine == "auto"
