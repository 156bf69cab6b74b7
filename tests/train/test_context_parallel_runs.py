"""Whole runs whose ranks divide sequences: the numbers of one rank, whatever is trained and however, and checkpoints
that any other mesh continues."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from ptf.compute import device_defaults
from ptf.compute.checkpoint import load_tensors
from ptf.compute.device_defaults import settled
from ptf.compute.lease import UNSHARED
from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import loads
from ptf.config.sections.compute import MeshSizes
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.config import GatedDelta
from ptf.model.context_parallel import raise_if_not_divided
from ptf.model.families import family_of
from ptf.model.kernels import document_mask
from ptf.model.model_files import read_config
from ptf.rl.weights import stored
from ptf.run import begin, run, run_rank
from ptf.train import step_metrics
from ptf.train.trainer import Trainer, load_model
from tests.model.ranks import on_processes, two_ranks, world_of
from tests.rl.role_ranks import train_online_as_rank
from tests.tiny import arithmetic, checkpoint, configured, job_file, online, write_jsonl
from tests.train.test_loop import facts
from tests.train.test_preferences import preferences
from tests.waiting import until

CONTEXT = {"launcher": "torchrun", "workers": 2, "mesh": {"context_parallel_size": 2}}
LORA = {"rank": 4, "alpha": 8}
PEAK = 1e18  # FLOP/s of one rank, as these tests have it
Raw = dict[str, Any]


def sums(directory: Path) -> Raw:
    raw = arithmetic(directory)
    configured(directory / "model", intermediate_size=128)  # so that its rows are blocks of four bits
    return raw


def conversations(directory: Path) -> Raw:
    """Chats of which each turn is a sample of its own, because the last answer is written in another way."""
    raw = sums(directory)
    template = directory / "model" / "chat_template.jinja"
    said = "m.role + '|>' + ('-' if loop.last and m.role == 'assistant' else '') + m.content"
    template.write_text(template.read_text().replace("m.role + '|>' + m.content", said))
    rows = []
    for numbers in np.random.default_rng(1).integers(1, 9, (60, 3)).tolist():
        turns = [(role, text) for n in numbers for role, text in (("user", f"{n}+{n}="), ("assistant", str(2 * n)))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    write_jsonl(directory / "train.jsonl", rows)
    return raw


CASES: dict[str, tuple[Callable[[Path], Raw], dict[str, Raw]]] = {  # the job, and what its sections have otherwise
    "sft": (sums, {}),
    "prefixes": (conversations, {"data": {"share_prefixes": True}, "train": {"optimizer": "adamw_offload"}}),
    "lora": (sums, {"model": {"lora": LORA}, "train": {"activation_checkpointing": "selective"}}),
    "nf4": (sums, {"model": {"lora": LORA, "quantization": "nf4"}, "train": {"activation_checkpointing": "block"}}),
    "8 bits": (sums, {"train": {"optimizer": "adamw_8bit", "activation_checkpointing": "offload"}}),
    "head": (sums, {"model": {"head": {"use": "tests.model.own:DeepHead", "args": {"width": 40}}}}),
    **{name: (partial(preferences, name=name), {}) for name in ("dpo", "rm", "kd", "kd ahead")},
}


def job_of(name: str, directory: Path) -> Raw:
    """The raw job of a case: three steps, held-out losses after the last."""
    made, changes = CASES[name]
    directory.mkdir()
    raw = made(directory)
    raw["train"] |= {"steps": 3, "validate_every": 3}
    raw["data"]["seq_len"] = 47  # odd: two ranks must fill it up
    for section, values in changes.items():
        raw[section] |= values
    return raw


def begun(raw: Raw, run_name: str) -> Path:
    directory = Path(raw["output"]) / run_name
    begin(loads(yaml.safe_dump(raw)), directory)
    return directory


def copied(directory: Path, raw: Raw, name: str, **compute: Any) -> Raw:
    """Copy a run that ended anyhow; return the job that continues the copy."""
    output = directory.parent.with_name(name)
    shutil.copytree(directory, output / directory.name)
    return {**raw, "output": str(output), "compute": raw["compute"] | compute}


def train(raw: Raw, run_name: str) -> Path:
    return run(loads(yaml.safe_dump(raw)), run_name)


def train_as_rank(sizes: MeshSizes, directories: Sequence[Path]) -> dict[str, str]:
    """Train each run, which has begun, as one of the ranks of a group; return the digests of the first."""
    step_metrics.peak_flops = lambda *_: PEAK
    for directory in directories:
        run_rank(str(directory), UNSHARED, world_of(sizes))
    return digests(directories[0], world_of(sizes))


def digests(directory: Path, world: World) -> dict[str, str]:
    """Those of what an engine is sent, by a policy that has loaded the newest checkpoint of the run."""
    job = loads((directory / "job.yaml").read_text())
    model = load_model(Path(job.model.path), world, job.model, seed=0, precision="fp32")
    newest = max(directory.glob("checkpoints/step_*"))
    load_tensors(str(newest), model, Trainer(model, world, job.train).optimizer, world)
    return dict(stored.collect(model.hf_tensors(), 0)[1].digests)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    return read_metrics(file) if file.exists() else []


def flops_of(directory: Path, ranks: int) -> list[float]:
    return [row["mfu"] * row["step_s"] * PEAK * ranks for row in rows_of(directory)]


def difference(found: Path, wanted: Path, metric: str, after: int = 0) -> float:
    """The largest in the steps after one, relative to the largest value there; of less, as surrogate losses are, whose
    terms cancel, relative to 0.1."""
    ours, theirs = (np.array([row[metric] for row in facts(where)[after:]]) for where in (found, wanted))
    return float(np.abs(ours - theirs).max() / max(0.1, np.abs(theirs).max()))


def raise_unless_alike(found: Path, wanted: Path, after: int = 0) -> None:
    """Compare every metric of the steps after one."""
    for ours, theirs in zip(facts(found)[after:], facts(wanted)[after:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for metric in ("loss", "grad_norm"):
        assert difference(found, wanted, metric, after) <= 2e-6, metric


@pytest.mark.long
def test_two_ranks_that_divide_sequences_have_the_numbers_of_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(step_metrics, "peak_flops", lambda *_: PEAK)
    jobs = {name: job_of(name, tmp_path / name) for name in CASES}
    divided = {name: begun({**raw, "compute": {**raw["compute"], **CONTEXT}}, "divided") for name, raw in jobs.items()}
    sent, _ = two_ranks(partial(train_as_rank, MeshSizes(context=2), [*divided.values()]), tmp_path)
    alone = {name: train(raw, "alone") for name, raw in jobs.items()}
    for name, found in divided.items():
        raise_unless_alike(found, alone[name])
        assert flops_of(found, 2) == pytest.approx(flops_of(alone[name], 1), rel=1e-9), name
    assert difference(divided["lora"], alone["sft"], "grad_norm") > 1e-2, "negative control"
    # what is sent and exported of one checkpoint, by two ranks and by one
    assert sent == digests(divided["sft"], World())
    assert sent != digests(alone["sft"], World()), "negative control: rounded otherwise"
    again = train(copied(divided["sft"], jobs["sft"], "again"), "divided")
    exported = [(run_of / "model" / "model.safetensors").read_bytes() for run_of in (again, divided["sft"])]
    assert exported[0] == exported[1] != (alone["sft"] / "model" / "model.safetensors").read_bytes()


def killed(raw: Raw, place: Path) -> tuple[Path, int]:
    """Begin a run by the command line, and kill it in the step after its first checkpoint; return its directory and
    that step."""
    directory, log, every = Path(raw["output"]) / "run", place / "killed.log", raw["checkpoint"]["every"]
    line = [sys.executable, "-m", "ptf.cli", "train", job_file(raw, place), "--run-name", "run"]
    with log.open("w") as out:
        process = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": os.getcwd()}, stdout=out, stderr=out)
    try:
        until(
            lambda: (
                process.poll() is not None
                or (len(rows_of(directory)) > every and [*directory.glob("checkpoints/*/manifest.json")])
            ),
            400,
            0.02,
        )
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(60)
        _, alive = psutil.wait_procs(family, 120)
        for each in alive:
            each.kill()
    assert not alive
    assert every < len(rows_of(directory)) < raw["train"]["steps"]
    return directory, max(int(path.parent.name[-8:]) for path in directory.glob("checkpoints/*/manifest.json"))


@pytest.mark.long
def test_the_same_mesh_goes_on_to_the_bit(tmp_path) -> None:
    jobs = {name: job_of(name, tmp_path / name) for name in ("sft", "8 bits")}
    for raw in jobs.values():
        raw["checkpoint"] = {"every": 1, "keep": 8}
    wholes = [begun({**raw, "compute": raw["compute"] | CONTEXT}, "run") for raw in jobs.values()]
    (tmp_path / "first").mkdir()
    two_ranks(partial(train_as_rank, MeshSizes(context=2), wholes), tmp_path / "first")
    found = list[Path]()
    for (name, raw), whole in zip(jobs.items(), wholes, strict=True):
        job = copied(whole, raw, f"{name} again", **CONTEXT)
        shutil.rmtree(Path(job["output"]) / "run" / "checkpoints" / "step_00000003")
        shutil.rmtree(Path(job["output"]) / "run" / "model")
        found.append(begun(job, "run"))
    (tmp_path / "again").mkdir()
    two_ranks(partial(train_as_rank, MeshSizes(context=2), found), tmp_path / "again")
    for each, whole in zip(found, wholes, strict=True):
        assert facts(each) == facts(whole)
        exported = [(run_of / "model" / "model.safetensors").read_bytes() for run_of in (each, whole)]
        assert exported[0] == exported[1]
    assert facts(wholes[0]) != facts(wholes[1]), "negative control"


FOUR = {"launcher": "torchrun", "workers": 4}
MESHES = {"context": MeshSizes(context=4), "sharded": MeshSizes(shard=4)}  # on which a killed run goes on


def raise_unless_continued(raw: Raw, found: Sequence[Path], directory: Path, whole: Path, step: int) -> None:
    """Compare continuations of the killed run in the directory from this step with a run that never stopped."""
    for each in found:
        assert facts(each)[:step] == facts(directory)[:step]
        raise_unless_alike(each, whole, step)
    other = train({**raw, "seed": 2}, "other")
    assert difference(other, whole, "loss", step) > 1e-3, "negative control"


@pytest.mark.cluster
def test_a_killed_sft_goes_on_with_any_mesh(tmp_path) -> None:
    """Two context groups of two ranks, by torchrun."""
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 16, "lr": 1e-4, "validate_every": 0}
    raw["checkpoint"] = {"every": 4, "keep": 8}
    whole = train(raw, "whole")
    directory, step = killed({**raw, "compute": raw["compute"] | CONTEXT | FOUR}, tmp_path)
    found = [train(copied(directory, raw, "one"), "run")]
    for name, sizes in MESHES.items():
        mesh = {"context_parallel_size": sizes.context}
        found.append(begun(copied(directory, raw, name, **FOUR, mesh=mesh), "run"))
        (tmp_path / f"ranks_{name}").mkdir()
        on_processes(4, partial(train_as_rank, sizes, found[-1:]), tmp_path / f"ranks_{name}")
    raise_unless_continued(raw, found, directory, whole, step)


@pytest.mark.cluster
def test_a_killed_grpo_goes_on_with_any_mesh(tmp_path) -> None:
    """Two context groups of two ranks, on a Ray of their own."""
    raw = online(arithmetic(tmp_path), tmp_path) | {"algo": {"num_minibatches": 2, "kl_coef": 0.1}}
    raw["model"]["lora"] = LORA
    raw["train"] |= {"steps": 6, "lr": 3e-3}
    raw["checkpoint"] = {"every": 2, "keep": 8}
    whole = train(raw, "whole")
    four = FOUR | {"launcher": "ray", "restarts": 0}
    directory, step = killed({**raw, "compute": raw["compute"] | CONTEXT | four}, tmp_path)
    found = [train(copied(directory, raw, "one"), "run")]
    jobs = [
        copied(directory, raw, name, **four, mesh={"context_parallel_size": sizes.context})
        for name, sizes in MESHES.items()
    ]
    on_processes(4, partial(train_online_as_rank, [(job, "run") for job in jobs]), tmp_path)
    found += [Path(job["output"]) / "run" for job in jobs]
    raise_unless_continued(raw, found, directory, whole, step)
    # an engine refuses weights whose digests are not those that it was told, and log-probs that are not the policy's
    assert all(row["canary_logprob_diff_max"] <= 1e-5 and row["sync_tensors"] for one in found for row in rows_of(one))
    assert max(row["kl_reference"] for row in rows_of(whole)) > 1e-4


@pytest.mark.long
def test_a_critic_and_a_teacher_divide_sequences_too(tmp_path) -> None:
    raw = online(arithmetic(tmp_path), tmp_path)
    raw["data"]["seq_len"] = 47
    raw["train"]["steps"] = 3
    tokenizer = Tokenizer.load(raw["model"]["path"])
    teacher = checkpoint(tmp_path / "teacher", vocab_size=tokenizer.vocab_size, seed=7)
    tokenizer.save(teacher)
    algo = {
        "ppo": {"num_minibatches": 2, "critic_lr": 3e-3, "bootstrap_truncated": True},
        "opd": {"num_minibatches": 2, "teacher": str(teacher)},
    }
    two = raw["compute"] | CONTEXT | {"launcher": "ray", "restarts": 0}
    jobs = {recipe: {**raw, "recipe": recipe, "algo": keys} for recipe, keys in algo.items()}
    on_processes(2, partial(train_online_as_rank, [({**job, "compute": two}, r) for r, job in jobs.items()]), tmp_path)
    for recipe, job in jobs.items():
        divided, alone = Path(raw["output"]) / recipe, train(job, f"{recipe}_alone")
        raise_unless_alike(divided, alone)
        assert difference(train({**job, "seed": 2}, f"{recipe}_other"), alone, "loss") > 1e-3, "negative control"
        assert all(row["canary_logprob_diff_max"] <= 1e-5 and row["sync_tensors"] for row in rows_of(divided))


REFUSED = {
    "backend": (
        {"model": {"backend": "hf"}},
        r"compute\.mesh\.context_parallel_size is not supported with model\.backend: hf; use ptf",
    ),
    "deterministic": (
        {"train": {"deterministic": True}},
        r"train\.deterministic needs .*compute\.mesh\.context_parallel_size: 1",
    ),
    "replace": (
        {"model": {"replace": {"layers.*.mlp": {"use": "tests.model.own:SameMLP"}}}},
        r"model\.replace needs compute\.mesh\.context_parallel_size: 1 .*a head may be replaced",
    ),
    "top_p": (
        {"rollout": {"top_p": 0.9}},
        r"rollout\.top_p .*compute\.mesh\.tensor_parallel_size or context_parallel_size above 1.*; use 1\.0",
    ),
    "workers": (
        {"compute": {"workers": 6, "mesh": {"context_parallel_size": 4}}},
        r"context_parallel_size \(4\) × tensor_parallel_size \(1\) must divide compute\.workers \(6\)",
    ),
    "data": (
        {"data": {"partitions": 3}, "compute": {"workers": 4}},
        r"data\.partitions \(3\) must be a multiple of compute\.workers \(4\) / compute\.mesh\.context_parallel_size",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_divide_sequences_is_refused_in_the_config(tmp_path, what) -> None:
    raw, (changes, message) = arithmetic(tmp_path), REFUSED[what]
    raw["compute"] |= CONTEXT
    if "rollout" in changes:
        raw = online(raw, tmp_path)
        raw["compute"]["launcher"] = "ray"
    loads(yaml.safe_dump(raw))
    for section, values in changes.items():
        raw[section] |= values
    with pytest.raises(UserError, match=f"(?s){message}".replace(" ", r"\s+")):
        loads(yaml.safe_dump(raw))


HEAD = {"use": "tests.model.own:DeepHead"}


def test_a_head_may_be_replaced(tmp_path) -> None:
    raw = arithmetic(tmp_path)
    loads(yaml.safe_dump({**raw, "compute": CONTEXT, "model": {**raw["model"], "replace": {"head": HEAD}}}))


LINEAR = GatedDelta(key_heads=4, value_heads=12, key_dim=8, value_dim=8, conv=4)
INDIVISIBLE = {  # what does not divide, how many ranks, and what of a model of 12 heads and 64 rows is otherwise
    r"12 attention heads": (8, {"kv_heads": 4}),
    r"64 rows of the vocabulary": (3, {"kv_heads": 6}),
    r"8 key-value heads \(nor they it\)": (12, {"kv_heads": 8, "head": "scalar"}),
    r"4 key heads of linear attention": (6, {"kv_heads": 6, "head": "scalar", "delta": LINEAR}),
    r"12 value heads of linear attention": (16, {"heads": 32, "kv_heads": 8, "delta": LINEAR}),
}


@pytest.mark.parametrize("what", INDIVISIBLE)
def test_a_model_that_the_ranks_do_not_divide_is_refused_with_the_sizes_that_fit(tmp_path, what) -> None:
    arithmetic(tmp_path)
    config = read_config(tmp_path / "model")
    (ranks, changes), whole = INDIVISIBLE[what], replace(family_of(config).config(config), heads=12)
    raise_if_not_divided(replace(whole, **changes), MeshSizes(context=2))
    message = rf"context_parallel_size: {ranks} does not divide the model's .*{what}.*; set it to one of 1, 2"
    with pytest.raises(UserError, match=message):
        raise_if_not_divided(replace(whole, **changes), MeshSizes(context=ranks))


def test_sequences_that_gpus_would_divide_inside_a_block_are_refused(tmp_path) -> None:
    raw = arithmetic(tmp_path)
    raw["compute"] |= {**CONTEXT, "workers": 4, "mesh": {"context_parallel_size": 2, "tensor_parallel_size": 2}}
    raw["data"]["seq_len"] = 1000
    assert device_defaults.BLOCK == document_mask.BLOCK
    job = loads(yaml.safe_dump(raw))
    settled(job, gpu=False)
    with pytest.raises(UserError, match=r"data\.seq_len \(1000\) must be a multiple of 128 on GPUs.*; use 1024"):
        settled(job, gpu=True)
    settled(job, job, gpu=True)  # a run that was begun goes on
    raw["data"]["seq_len"] = 1024
    settled(loads(yaml.safe_dump(raw)), gpu=True)
