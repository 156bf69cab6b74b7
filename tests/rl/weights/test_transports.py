"""The table of the transports is the one that configs choose from, and asks for what each needs."""

import importlib
import sys
from subprocess import run
from typing import Any, get_args

import pytest
import yaml

from ptf.config import Job, loads
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.transports import (
    TRANSPORTS,
    advice,
    config_rules,
    resolve_transport,
    rules_of,
    with_lora_sync,
)
from ptf.rl.online_budget import RATES
from ptf.rl.weights.streamed import Streamed
from ptf.rl.weights.transport import Transport


def test_a_config_can_name_each_transport_and_no_other():
    assert set(get_args(RolloutConfig.model_fields["transport"].annotation)) == {*TRANSPORTS, "auto"}


def test_the_table_and_the_classes_agree():
    for transport in TRANSPORTS.values():
        module, _, name = transport.code.partition(":")
        kind = getattr(importlib.import_module(module), name)
        assert issubclass(kind, Transport)
        assert issubclass(kind, Streamed) == transport.streams
    assert not any(transport.streams and transport.in_files for transport in TRANSPORTS.values())


def test_every_link_of_a_transport_has_a_rate():
    assert RATES.keys() == {link for transport in TRANSPORTS.values() for link in transport.link_crossings}


def test_a_config_is_checked_without_torch():
    code = "import sys; import ptf.config.transports; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def job(*, pools: dict[str, Any] | None = None, launcher: str = "ray", ranks: int = 1, **rollout: Any) -> Job:
    raw = {
        "recipe": "grpo",
        "model": {"path": "m", "lora": {"rank": 4}},
        "data": {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}, "seq_len": 64},
        "rollout": {"engine": "native", "reward": {"use": "a:b"}, "max_new_tokens": 8, **rollout},
        "train": {"steps": 2, "lr": 1e-4, "precision": "bf16"},
        "compute": {"launcher": launcher, "pools": pools or {}, "workers": ranks},
    }
    return loads(yaml.safe_dump(raw))


APART = {"training": {"roles": ["policy"]}, "generating": {"roles": ["rollout"]}}


@pytest.mark.parametrize(
    ("keys", "gpu", "lines"),
    [
        ({"ranks": 2}, True, ["weights: with rollout.replicas: 2 they would go by ipc"]),
        ({"ranks": 2, "replicas": 2}, True, []),
        ({"ranks": 2}, False, []),
        ({"ranks": 2, "transport": "files"}, True, []),
        ({"ranks": 2, "engine": {"use": "a:b"}}, True, []),
    ],
)
def test_what_keeps_weights_from_the_fastest_is_said(keys, gpu, lines):
    assert advice(job(**keys), gpu) == lines


@pytest.mark.parametrize(
    ("keys", "gpu", "transport"),
    [
        ({}, True, "ipc"),
        ({"pools": APART}, True, "nccl"),
        ({"replicas": 2}, True, "files"),  # in one pool with one rank of the policy
        ({"engine": {"use": "a:b"}}, True, "files"),
        ({"lora_sync": "adapter"}, True, "object_store"),
        ({"launcher": "local"}, True, "object_store"),
        ({}, False, "object_store"),
        ({"transport": "files"}, True, "files"),
        ({"transport": "object_store"}, True, "object_store"),
    ],
)
def test_the_fastest_that_a_job_can_use_is_chosen(keys, gpu, transport):
    found = job(**keys)
    assert resolve_transport(found, gpu) == transport
    assert not any(rules_of(found, TRANSPORTS[transport]).values())
    assert not any(config_rules(found).values())


@pytest.mark.parametrize(
    ("keys", "gpu", "experts", "sent"),
    [
        ({"engine": "vllm"}, True, False, "adapter"),
        ({"engine": "vllm"}, False, False, "merged"),
        ({"engine": "vllm"}, True, True, "merged"),
        ({"engine": "native"}, True, False, "merged"),
        ({"engine": "vllm", "transport": "ipc"}, True, False, "merged"),
        ({"engine": "vllm", "transport": "files"}, True, False, "adapter"),
        ({"engine": "vllm", "lora_sync": "merged"}, True, False, "merged"),
        ({"engine": "vllm", "lora_sync": "adapter"}, False, True, "adapter"),
    ],
)
def test_an_adapter_is_sent_alone_where_the_engine_can_apply_it(keys, gpu, experts, sent):
    found = with_lora_sync(job(**keys), gpu, experts)
    assert found.rollout is not None
    assert found.rollout.lora_sync == sent
    assert not any(rules_of(found, TRANSPORTS[resolve_transport(found, gpu)]).values())
    plain = job(**keys)
    without = plain.model_copy(update={"model": plain.model.model_copy(update={"lora": None})})
    if plain.rollout is not None and plain.rollout.lora_sync == "auto":
        resolved = with_lora_sync(without, gpu, experts).rollout
        assert resolved is not None
        assert resolved.lora_sync == "merged"
