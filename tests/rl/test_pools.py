"""Pools: who shares devices changes nothing but who waits; and who waits gives its memory back."""

import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

from ptf.compute.offload import release_freed_memory
from ptf.compute.world import World, joined
from ptf.config import ConfigError, loads
from ptf.data.document import Document
from ptf.errors import UserError
from ptf.recipes import registry
from ptf.rl.cluster import LocalCluster, Pool, RoleSpec, phase_table
from ptf.rl.roles import Learner, LearnerSettings
from tests.child import run_python
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_controller import train
from tests.tiny import configured
from tests.train.test_loop import facts

SFT_DATA = {"sources": {"rows": {"path": "rows.jsonl"}}, "seq_len": 64}
TRAINED = ["policy", "reference", "critic"]
POOLS = {
    "colocated": {"all": {"roles": [*TRAINED, "rollout"], "offload": "disk"}},
    "disaggregated": {"training": {"roles": TRAINED, "offload": "disk"}, "generating": {"roles": ["rollout"]}},
}


@pytest.fixture
def ppo(raw):
    """Four roles: policy, reference, critic, rollout."""
    return {
        **raw,
        "recipe": "ppo",
        "algo": {"num_minibatches": 2, "critic_lr": 3e-3, "kl_coef": 0.01},
        "track": {"tensorboard": False, "samples_every": 1},
    }


def left(made: Path) -> dict[str, object]:
    """Return the results of a run that must not depend on where its roles run: metrics without times, samples and
    weights."""
    return {
        "metrics": facts(made),
        "samples": (made / "samples.jsonl").read_text(),
        "weights": (made / "model" / "model.safetensors").read_bytes(),
    }


@pytest.mark.cluster
def test_colocated_and_disaggregated_pools_train_the_same_weights(ppo, capsys):
    ppo["train"] |= {"steps": 2}
    want = left(train(ppo, "default"))
    capsys.readouterr()
    for name, pools in POOLS.items():
        made = train({**ppo, "compute": {**ppo["compute"], "pools": pools}}, name)
        said = capsys.readouterr().out
        assert left(made) == want, name
        assert not (made / "offloaded").exists()
        lines = [line.split() for line in said[said.index("its phases:") :].splitlines()]
        parked = next(line[6] for line in lines if line[:2] == ["logprobs", "policy"])
        assert parked == {"colocated": "rollout", "disaggregated": "-"}[name], (
            "who gave way to the policy after the rollout"
        )


@pytest.mark.parametrize(
    ("pools", "fault"),
    [
        ({"a": {"roles": ["policy"]}}, "compute.pools  no pool has the role rollout"),
        (
            {"a": {"roles": ["policy", "rollout"]}, "b": {"roles": ["rollout"]}},
            "compute.pools  role rollout is in more than one",
        ),
        ({"a": {"roles": ["policy", "rollout"], "offload": "tape"}}, "compute.pools.a.offload"),
    ],
)
def test_faults_in_the_config(raw, pools, fault):
    with pytest.raises(ConfigError, match=fault):
        loads(yaml.safe_dump({**raw, "compute": {**raw["compute"], "pools": pools}}))


APART = {"a": {"roles": ["policy", "reference"]}, "b": {"roles": ["rollout"]}}


@pytest.mark.parametrize(
    ("transport", "change", "fault"),
    [
        (
            "ipc",
            {"compute": {"launcher": "local"}},
            "ipc: policy and rollout need processes of their own: compute.launcher: ray",
        ),
        (
            "ipc",
            {"rollout": {"replicas": 2}},
            (
                "ipc: policy and rollout must be in one pool, with as many rollout.replicas × "
                "rollout.tensor_parallel_size as compute.workers"
            ),
        ),
        ("ipc", {"compute": {"pools": APART}}, "ipc: policy and rollout must be in one pool"),
        ("nccl", {}, "nccl: policy and rollout must be in different compute.pools"),
        (
            "nccl",
            {"compute": {"pools": APART}, "rollout": {"engine": {"use": "a:b"}}},
            "nccl: rollout.engine must be native or vllm",
        ),
        (
            "nccl",
            {"compute": {"pools": APART}, "model": {"backend": "hf"}},
            "nccl: model.backend: hf does not know the names",
        ),
        (
            "ipc",
            {"rollout": {"lora_sync": "adapter"}, "model": {"lora": {"rank": 4}}},
            "ipc: sends whole models only, but rollout.lora_sync is adapter; use object_store or files, or "
            "lora_sync: merged",
        ),
    ],
)
def test_weights_that_cannot_go_from_device_to_device_so(raw, transport, change, fault):
    raw["compute"] |= {"launcher": "ray"}
    raw["rollout"] |= {"transport": transport}
    loads(yaml.safe_dump({**raw, "compute": raw["compute"] | ({} if transport == "ipc" else {"pools": APART})}))
    for section, values in change.items():
        raw[section] |= values
    with pytest.raises(ConfigError, match=f"rollout.transport  {fault}"):
        loads(yaml.safe_dump(raw))


def test_pools_of_a_job_without_rollouts_are_refused(raw):
    sft = {k: v for k, v in raw.items() if k not in ("rollout", "algo", "evaluate")} | {"recipe": "sft"}
    sft["data"] = {**sft["data"], "sources": {"p": {"path": "rows.jsonl"}}}
    with pytest.raises(ConfigError, match=r"compute\.pools  is for recipes with rollouts"):
        loads(yaml.safe_dump({**sft, "compute": {**sft["compute"], "pools": {"a": {"roles": ["policy"]}}}}))


def test_vllm_does_not_park_on_disk(raw):
    changed = {
        **raw,
        "rollout": {**raw["rollout"], "engine": "vllm"},
        "compute": {"pools": {"a": {"roles": ["policy", "rollout"], "offload": "disk"}}},
    }
    with pytest.raises(ConfigError, match=r"compute\.pools\.a\.offload  vllm cannot be offloaded to disk"):
        loads(yaml.safe_dump(changed))


@pytest.mark.parametrize(
    ("roles", "fault"),
    [
        (["policy", "rollout"], "no pool has the role reference"),
        (["policy", "rollout", "reference", "critic"], "this job has no role critic; it has policy"),
    ],
)
def test_roles_that_the_recipe_has_or_has_not(raw, roles, fault):
    raw = {**raw, "algo": {"kl_coef": 0.1}, "compute": {**raw["compute"], "pools": {"all": {"roles": roles}}}}
    with pytest.raises(UserError, match=fault):
        train(raw)


class Noting:
    """A role that records when it is offloaded, restored and called."""

    distributed = False
    turns: list[str]

    def __init__(self, world: World, name: str) -> None:
        self.name, self.waiting = name, False

    def offload(self) -> None:
        self.waiting = True
        Noting.turns.append(f"{self.name} parks")

    def onload(self) -> None:
        self.waiting = False
        Noting.turns.append(f"{self.name} wakes")

    def peak_memory_gib(self) -> float:
        return 0.25 if self.waiting else 2.0


def test_only_roles_of_one_pool_give_way_to_each_other():
    Noting.turns = []
    cluster = LocalCluster(
        World(), [Pool("a", frozenset({"p", "q"}), (2,), disk=True), Pool("b", frozenset({"r", "s"}), (2,))]
    )
    p, q, r, s = (cluster.start(RoleSpec(name, Noting, name)) for name in "pqrs")
    assert Noting.turns == ["p parks"]
    for group in (q, r, p, p, s, q):
        with cluster.phase(group, f"of {group.spec.name}"):
            pass
    assert Noting.turns == ["p parks", "q parks", "p wakes", "p parks", "q wakes"]
    assert [turn.offloaded for turn in cluster.table] == [{}, {}, {"q": 0.25}, {}, {}, {"p": 0.25}]
    lines = phase_table(cluster.table).splitlines()
    assert lines[0].split() == ["phase", "role", "pool", "workers", "seconds", "GiB", "offloaded"]
    assert lines[3].split()[:4] == ["of", "p", "p", "a"]
    assert lines[3].endswith("2.00  q 0.25 GiB")
    with pytest.raises(UserError, match=r"compute\.pools: role t is in none of a \(1 × p, q\), b \(1 × r, s\)"):
        cluster.start(RoleSpec("t", Noting, "t"))


CEILING = """
    import os, sys, threading, time
    import psutil
    from ptf.config import load
    from ptf.run import run
    import ptf.rl.online_run, ptf.rl.controller, torch  # what is there before any role is

    ceiling = float(sys.argv[2]) * 2**20 + psutil.Process().memory_info().rss
    most = 0
    def watch():  # as the kernel would of a machine without more memory
        global most
        while True:
            held = psutil.Process().memory_info().rss
            most = max(most, held)
            if held > ceiling:
                os.write(2, b"OUT OF MEMORY")
                os._exit(137)
            time.sleep(0.002)
    threading.Thread(target=watch, daemon=True).start()
    run(load(sys.argv[1]), "a")
    print("MOST", (most - ceiling) / 2**20 + float(sys.argv[2]))
"""
# of the model below; with its gradients and AdamW four times that, and there are two that are trained
WEIGHTS_MIB = 43.5


@pytest.fixture
def large(ppo, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    configured(tmp_path / "model", num_hidden_layers=3, **sizes)
    return {
        **ppo,
        "train": {**ppo["train"], "steps": 2, "validate_every": 0},
        "evaluate": {},
        "checkpoint": {"every": 1},
        "track": {"tensorboard": False},
    }


def bounded(raw: dict, place: Path, mib: float) -> subprocess.CompletedProcess:
    """Run the job in a process whose memory may grow by so many bytes after its start."""
    script, job = place / "bounded.py", place / "job.yaml"
    script.write_text(textwrap.dedent(CEILING))
    job.write_text(yaml.safe_dump(raw))
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "MALLOC_MMAP_THRESHOLD_": "65536"}
    return run_python(str(script), str(job), str(mib), env=env, timeout=300)


@pytest.mark.cluster
def test_two_roles_run_where_only_one_has_room(large, tmp_path):
    """Policy and critic take 174 MiB each when they are trained, reference and rollout 44: more than fits,
    unless they take turns."""
    done = bounded(large, tmp_path, 300)
    assert done.returncode == 137, done.stdout[-2000:] + done.stderr[-2000:]
    assert "OUT OF MEMORY" in done.stderr
    done = bounded(
        {**large, "output": f"{large['output']}/turns", "compute": {**large["compute"], "pools": POOLS["colocated"]}},
        tmp_path,
        300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert 4 * WEIGHTS_MIB < float(done.stdout.split("MOST")[1]) < 300


def learner_of(raw: dict, world: World, place: Path, **train: object) -> Learner:
    offline = {k: v for k, v in raw.items() if k not in ("rollout", "algo", "evaluate")}
    job = loads(yaml.safe_dump({**offline, "recipe": "sft", "data": SFT_DATA}))
    settings = LearnerSettings(
        directory=Path(job.model.path),
        section=job.model,
        train=job.train.model_copy(update=train),
        seed=0,
        seq_len=64,
        offload_path=str(place / "offloaded"),
        recipe=registry.build(job),
        tokenizer=job.model.path,
    )
    return Learner(world, settings)


def test_a_parked_learner_holds_neither_weights_nor_optimizer(large, tmp_path):
    with joined("cpu", 60) as world:
        learner = learner_of(large, world, tmp_path)
        units = [(Document(np.arange(9, dtype=np.int32), np.ones(9, np.float32)),)]
        learner.update([units], 0)
        size = sum(p.nbytes for p in learner.model.parameters())
        weights = [p.detach().sum().item() for p in learner.model.parameters()]
        release_freed_memory()
        before = learner.peak_memory_gib()
        learner.offload()
        assert (before - learner.peak_memory_gib()) * 2**30 >= 0.99 * 3 * size, (
            "weights and both moments, but for parts of pages"
        )
        learner.onload()
        assert weights == [p.detach().sum().item() for p in learner.model.parameters()]
        learner.update([units], 1)


def test_what_a_forward_has_gathered_is_parked_too(large, tmp_path):
    """In bf16 a learner is FSDP's on one rank too; after `prompt_logprobs` its root holds gathered copies."""
    with joined("cpu", 60) as world:
        learner = learner_of(large, world, tmp_path, precision="bf16")
        tokens = [np.arange(9, dtype=np.int32)]
        (before,) = learner.prompt_logprobs(tokens)
        learner.offload()
        learner.model.reshard()  # type: ignore[operator]
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in learner.model.parameters())
        learner.onload()
        assert (learner.prompt_logprobs(tokens)[0] == before).all()


@pytest.mark.cluster
def test_one_process_or_several_in_any_pools_sample_and_train_the_same(raw, ray_cluster):
    """In the deterministic mode, to the bit: in this process, and on Ray with one rank and with two, colocated and not,
    with two engines, with weights from memory, through files, through memory that both see, and by broadcast."""
    raw = {
        **raw,
        "algo": {"num_minibatches": 2, "kl_coef": 0.01},
        "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 8},
    }
    raw["train"] = {**raw["train"], "steps": 3, "deterministic": True}
    want = left(train(raw, "here"))
    assert all(row["logprob_diff_max"] <= 1e-5 for row in want["metrics"])
    two = {"training": {"roles": ["policy", "reference"]}, "generating": {"roles": ["rollout"]}}
    one = {"all": {"roles": ["policy", "reference", "rollout"], "offload": "disk"}}
    for name, workers, engines, pools, sent in (
        ("ray", 1, 1, {}, "path"),
        ("apart", 2, 1, two, "nccl"),
        ("together", 2, 2, one, "ipc"),
    ):
        compute = {"launcher": "ray", "device": "cpu", "workers": workers, "threads": 1, "pools": pools}
        rollout = {**raw["rollout"], "replicas": engines, "transport": sent}
        made = left(train({**raw, "compute": compute, "rollout": rollout}, name))
        assert made["samples"] == want["samples"], name
        assert made["weights"] == want["weights"], name
        assert made["metrics"] == want["metrics"], name
