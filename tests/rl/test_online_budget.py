"""What `ptf plan` says of an online job: every role, in every phase, on the devices of its pool."""

import inspect
import json
from pathlib import Path

import pytest
import yaml

from ptf.cli import main
from ptf.config import Job, loads
from ptf.errors import UserError
from ptf.rl.online_budget import OnlineBudget, online_budget
from ptf.rl.weights.stored import BUCKET_BYTES
from ptf.train.budget import GIB, budget
from tests.tiny import job_file
from tests.train.test_budget import DENSE, directory

LAYERS, KV_HEADS, HEAD = DENSE["num_hidden_layers"], DENSE["num_key_value_heads"], DENSE.get("head_dim", 64)
TOKEN = 2 * 2 * LAYERS * KV_HEADS * HEAD  # bytes of keys and values in bf16
APART = {"gang": {"roles": ["policy", "reference"]}, "generate": {"roles": ["rollout"]}}


TRAIN = {"steps": 1, "lr": 1e-5, "micro_batch_sequences": 2, "precision": "bf16"}


def job(path: Path, *, recipe: str = "grpo", algo: dict | None = None, model: dict | None = None, **sections) -> Job:
    raw = {
        "recipe": recipe,
        "algo": algo or {},
        "output": str(path / "runs"),
        "model": {"path": str(directory(path, DENSE)), **(model or {})},
        "data": {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}, "seq_len": 1024},
        "train": TRAIN,
        "rollout": {
            "reward": {"use": "ptf.rl.rewards:exact"},
            "engine": "vllm",
            "replicas": 4,
            "prompts_per_step": 64,
            "group_size": 8,
            "max_new_tokens": 256,
            "gpu_memory_utilization": 0.5,
            **sections.pop("rollout", {}),
        },
        "compute": {"workers": 4, **sections.pop("compute", {})},
    }
    return loads(yaml.safe_dump(raw | sections))


def planned(path: Path, *, gpus: int = 4, room_gib: float = 80.0, **more) -> OnlineBudget:
    return online_budget(job(path, **more), path, gpus, room_gib=room_gib)


def phases(plan: OnlineBudget, pool: int = 0) -> dict[str, set[str]]:
    return {phase: set(of) for phase, of in plan.pools[pool].phases.items()}


def test_what_is_compiled_takes_less_in_every_phase_with_activations(tmp_path) -> None:
    for recipe, algo, expected in (
        ("grpo", {"kl_coef": 0.01, "update_epochs": 2}, {"update", "logprobs", "reference"}),
        ("ppo", {}, {"update", "update critic", "values"}),
    ):
        compiled, not_compiled = (
            planned(tmp_path, recipe=recipe, algo=algo, train={**TRAIN, "compile": setting}).pools[0]
            for setting in ("auto", False)
        )
        less = {phase for phase in compiled.phases if compiled.total(phase) < not_compiled.total(phase)}
        assert less == expected


def test_ranks_that_divide_the_sequences_need_less_in_every_phase_with_activations(tmp_path) -> None:
    long = {"sources": {"a": {"path": "a.jsonl", "kind": "prompt"}}, "seq_len": 16384}
    algo = {"kl_coef": 0.01, "update_epochs": 2}
    whole, divided = (
        planned(tmp_path, recipe="ppo", algo=algo, data=long, compute={"mesh": {"context_parallel_size": size}}).pools[
            0
        ]
        for size in (1, 2)
    )
    less = {phase for phase in divided.phases if divided.total(phase) < 0.7 * whole.total(phase)}
    assert less == {"update", "logprobs", "reference", "update critic", "values"}
    # weights and averages are divided over all ranks as before
    assert all(divided.total(phase) == whole.total(phase) for phase in divided.phases.keys() - less)


def test_a_policy_alone_has_an_update_a_rollout_and_a_sync(tmp_path) -> None:
    plan = planned(tmp_path)
    (pool,) = plan.pools
    assert phases(plan) == {
        "update": {"policy"},
        "rollout": {"rollout"},
        "sync policy and rollout": {"policy", "rollout"},
    }
    assert plan.transport == "ipc"  # one pool, an engine for each worker
    assert pool.phases["update"]["policy"] == plan.update.memory.total
    assert pool.phases["rollout"]["rollout"] == 0.5 * plan.room
    held = 12 * plan.update.parameters / 4  # weights and two averages; there are gradients in the update only
    weights = 2 * plan.update.parameters
    assert plan.engine.weights == weights
    assert pool.phases["sync policy and rollout"] == {
        "policy": held + 2 * BUCKET_BYTES,
        "rollout": weights + 2 * BUCKET_BYTES,
    }
    assert plan.engine.cache == 0.5 * plan.room - weights
    assert plan.engine.responses == pytest.approx(4 * plan.engine.cache / (TOKEN * 1024))
    assert plan.host == held  # offloaded while the engines answer; vLLM discards its weights
    assert plan.fits
    assert plan.sync.sent == weights


def test_a_reference_and_a_critic_are_roles_and_lora_is_its_own_reference(tmp_path) -> None:
    kl = {"kl_coef": 0.01, "update_epochs": 2}
    plan = planned(tmp_path, algo=kl)
    assert {"update", "logprobs", "reference", "rollout"} <= phases(plan).keys()
    (pool,) = plan.pools
    assert pool.phases["reference"].keys() == {"reference"}
    frozen = 2 * plan.update.parameters / 4  # bf16 shards, without gradients and optimizer
    assert (
        frozen
        < pool.phases["reference"]["reference"]
        < pool.phases["logprobs"]["policy"]
        < pool.phases["update"]["policy"]
    )
    assert plan.host == 12 * plan.update.parameters / 4 + frozen
    away = planned(tmp_path, algo=kl, train={**TRAIN, "optimizer": "adamw_offload"})
    assert away.host == plan.host  # the averages, all the time
    assert (
        away.pools[0].phases["logprobs"]["policy"] == pool.phases["logprobs"]["policy"] - 8 * plan.update.parameters / 4
    )

    adapted = planned(tmp_path, algo=kl, model={"lora": {"rank": 8}})
    assert adapted.pools[0].phases["reference"].keys() == {"policy"}
    assert adapted.pools[0].phases["update"]["policy"] < 0.8 * pool.phases["update"]["policy"]

    ppo = planned(tmp_path, recipe="ppo", algo={"update_epochs": 2})
    assert {"values", "update critic"} <= phases(ppo).keys()
    update = ppo.pools[0].phases
    assert update["values"]["critic"] < update["update critic"]["critic"] < update["update"]["policy"]  # no vocabulary


def test_roles_with_devices_of_their_own_do_not_share_them(tmp_path) -> None:
    kl = {"kl_coef": 0.01}
    plan = planned(
        tmp_path, algo=kl, compute={"workers": 4, "pools": APART}, rollout={"replicas": 1, "tensor_parallel_size": 2}
    )
    assert plan.transport == "nccl"
    gang, generate = plan.pools
    assert (gang.devices, generate.devices) == (4, 2)
    assert phases(plan) == {"update": {"policy"}, "reference": {"reference"}, "sync policy": {"policy"}}
    assert phases(plan, 1) == {"rollout": {"rollout"}, "sync rollout": {"rollout"}}
    assert plan.engine.weights == plan.update.parameters  # half of them, two bytes each
    with pytest.raises(UserError, match=r"compute\.pools: no pool has the role reference"):
        planned(tmp_path, algo=kl, compute={"pools": {"all": {"roles": ["policy", "rollout"]}}})
    with pytest.raises(UserError, match=r"compute\.pools: this job has no role reference"):
        planned(tmp_path, compute={"pools": APART})


def test_an_update_has_the_answers_of_a_step_whatever_the_sequences_of_offline_jobs_are(tmp_path) -> None:
    plan = planned(tmp_path, gpus=16, algo={"update_epochs": 2}, compute={"workers": 16}, rollout={"replicas": 16})
    assert plan.update.micro_batch_sequences == 2
    assert plan.update.tokens == 2 * 64 * 8 * 1024  # epochs × prompts × answers × tokens
    alone = planned(tmp_path, gpus=16, compute={"workers": 16}, rollout={"replicas": 16, "prompts_per_step": 1})
    assert alone.update.micro_batch_sequences == 1  # eight answers over sixteen GPUs


def test_the_native_engine_holds_contexts_once_and_each_answer(tmp_path) -> None:
    plan = planned(tmp_path, rollout={"engine": "native", "prompts_per_step": 40, "transport": "files"})
    cache = TOKEN * (10 * (1024 - 256) + 80 * 256)  # ten prompts, eight answers to each
    assert plan.engine.cache == cache
    assert plan.pools[0].phases["rollout"]["rollout"] == plan.engine.weights + cache
    assert plan.host == 12 * plan.update.parameters / 4 + plan.engine.weights + plan.sync.host


def test_what_does_not_fit_is_named_with_the_key_that_changes_it(tmp_path, capsys) -> None:
    plan = planned(tmp_path, room_gib=0.2)
    assert not plan.fits
    assert any(
        "pool all, phase update" in problem and "train.micro_batch_sequences" in problem for problem in plan.problems
    )
    none = planned(tmp_path, rollout={"gpu_memory_utilization": 0.0001})
    assert any(
        "raise rollout.gpu_memory_utilization or rollout.tensor_parallel_size" in problem for problem in none.problems
    )
    file = job_file(job(tmp_path).model_dump(mode="json", exclude_defaults=True), tmp_path)
    assert main(["plan", file, "--workers", "4", "--gpu-memory-gib", "0.2"]) == 1
    assert "does not fit: pool all, phase update" in capsys.readouterr().out
    assert main(["plan", file, "--workers", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = planned(tmp_path)
    assert found["memory_gib"]["update"] == {
        "pool": "all",
        "policy": whole.update.memory.total / GIB,
        "total": whole.update.memory.total / GIB,
    }
    assert found["sync"]["transport"] == "ipc"
    with pytest.raises(UserError, match=r"a rollout engine of your own"):
        planned(tmp_path, rollout={"engine": {"use": "a.b:C"}})


def test_a_plan_is_for_the_same_gpu_by_default_online_and_offline() -> None:
    for plan in (budget, online_budget):
        given = inspect.signature(plan).parameters
        assert {name: given[name].default for name in ("room_gib", "mfu", "gpu")} == {
            "room_gib": 80.0,
            "mfu": 0.4,
            "gpu": "H100",
        }
