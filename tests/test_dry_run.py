"""`ptf check --dry-run` and `ptf doctor`."""

import json
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from ptf.cli import main
from ptf.config import loads
from ptf.data.tokenizer import Tokenizer
from ptf.inspection import doctor
from ptf.inspection.dry_run import SMALL, memory, narrow
from ptf.model.families import family_of
from ptf.rl.online_budget import online_budget
from ptf.train.budget import budget, config_directory
from tests.loopback import Loopback, running
from tests.tiny import arithmetic, checkpoint, job_file, online, write_jsonl
from tests.train.test_preferences import preferences

Said = Callable[[dict[str, Any], int], str]


@pytest.fixture
def said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Said:
    """Return a function that rehearses a job, which must end with this status, and returns what it said."""

    def said(raw: dict[str, Any], status: int) -> str:
        file = job_file(raw, tmp_path)
        before = sorted(tmp_path.rglob("*"))
        found = main(["check", "--dry-run", file])
        out = capfd.readouterr()
        assert found == status, out.out + out.err
        assert sorted(tmp_path.rglob("*")) == before  # it leaves nothing
        return out.out + out.err

    return said


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    return arithmetic(tmp_path)


def sampled(raw: dict[str, Any], tmp_path: Path, reward: str) -> dict[str, Any]:
    return online(raw, tmp_path, reward) | {"train": {"steps": 100, "lr": 1e-4, "precision": "fp32"}}


def test_a_job_that_works(raw: dict[str, Any], said: Said) -> None:
    raw["compute"] = {"launcher": "ray", "workers": 4}
    text = said(raw, 0)
    assert "no problem found" in text
    assert "step 1/1" in text
    assert ("GPU" in text) is torch.cuda.is_available(), "its memory is of interest where there is one"


def test_an_online_job_that_works(raw: dict[str, Any], tmp_path: Path, said: Said) -> None:
    assert "reward" in said(sampled(raw, tmp_path, "ptf.rl.rewards:numeric"), 0)


def test_a_job_of_many_engines_is_rehearsed_with_one(raw: dict[str, Any], tmp_path: Path, said: Said) -> None:
    job = sampled(raw, tmp_path, "ptf.rl.rewards:numeric")
    job["compute"] = {"launcher": "ray", "workers": 4}
    job["rollout"] |= {"engine": "vllm", "replicas": 2, "tensor_parallel_size": 2}
    assert "no problem found" in said(job, 0)


def test_memory_is_that_of_the_plan(raw: dict[str, Any], tmp_path: Path) -> None:
    """Of an online job, that of its fullest pool in its fullest phase, engine and frozen roles included."""
    raw["compute"] = {"launcher": "ray", "workers": 2}
    offline = loads(json.dumps(raw))
    directory = config_directory(offline.model.path)
    needed = budget(offline, directory, 2).memory.total / 2**30
    assert memory(offline) == f"memory: {needed:.1f} GiB on the fullest of 2 GPUs"
    job = loads(json.dumps(sampled(raw, tmp_path, "ptf.rl.rewards:numeric")))
    plan = online_budget(job, directory, 2)
    fullest = max(pool.total(phase) for pool in plan.pools for phase in pool.phases) / 2**30
    assert memory(job) == f"memory: {fullest:.1f} GiB on the fullest of {plan.gpus} GPUs"
    assert fullest > 2 * budget(job, directory, 2).memory.total / 2**30  # the engine's cache is most of it


@pytest.mark.parametrize("name", ["kd", "kd ahead"])
def test_teachers_are_narrow_too(name: str, tmp_path: Path, said: Said) -> None:
    raw = preferences(tmp_path, name)
    assert "step 1/1" in said(raw, 0)
    (tmp_path / "teacher" / "model.safetensors").unlink()
    assert f"wide: {tmp_path}/teacher has no model.safetensors" in said(raw, 2)


def test_a_reference_that_does_not_fit_is_found(tmp_path: Path, said: Said) -> None:
    raw = preferences(tmp_path, "dpo")
    raw["algo"] = {"reference": str(checkpoint(tmp_path / "other", num_hidden_layers=3))}
    assert "reference: the model in" in said(raw, 2)


def test_a_reference_beside_the_model_is_narrow_too(tmp_path: Path, said: Said) -> None:
    raw = preferences(tmp_path, "dpo")
    place = Path(raw["model"]["path"])
    sizes = json.loads((place / "config.json").read_text())
    shared = {key: sizes[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    other = checkpoint(tmp_path / "other", **shared)
    Tokenizer.load(str(place)).save(str(other))
    raw["algo"] = {"reference": str(other)}
    assert "step 1/1" in said(raw, 0)


def test_a_reward_that_raises_is_found(raw: dict[str, Any], tmp_path: Path, said: Said) -> None:
    raw = sampled(raw, tmp_path, "ptf.rl.rewards:numeric")
    raw["rollout"]["reward"]["args"] = {"column": "absent"}
    assert "absent" in said(raw, 2)


def test_a_row_that_cannot_be_masked_is_found(raw: dict[str, Any], tmp_path: Path, said: Said) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": "1+1="}]}])
    assert "train.jsonl:1" in said(raw, 2)


def test_a_place_that_cannot_be_written_is_found(raw: dict[str, Any], tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").touch()
    raw["checkpoint"] = {"to": str(tmp_path / "file" / "below")}
    assert "checkpoint.to" in said(raw, 2)


def test_a_narrow_config_keeps_the_family_and_the_depth() -> None:
    wide = {
        "model_type": "x",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 9,
    }
    small = narrow({**wide, "quantization_config": {}, "text_config": wide})
    assert small["num_hidden_layers"] == 36
    assert small["hidden_size"] == small["text_config"]["hidden_size"] == 64
    assert small["vocab_size"] == 9
    assert "quantization_config" not in small


def test_the_doctor_says_what_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    assert not [f for f in doctor.findings() if f.name in doctor.NEEDED and f.problem]
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("torch", "ray") else "1")
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: 2)
    problems = {f.name: f.problem for f in doctor.findings() if f.problem}
    assert "cannot run without it" in problems["torch"]
    assert "launcher: ray" in problems["ray"]
    assert "nvidia-smi sees 2, torch 0" in problems["GPUs"]


def test_the_doctor_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        return next(f.value for f in doctor.findings() if f.name == "Hugging Face")

    with running(Loopback(SimpleHTTPRequestHandler)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        assert found() == "reachable"
    assert "cannot be reached (ConnectError" in found()


def test_every_size_of_a_model_is_narrowed() -> None:
    wide = dict.fromkeys(SMALL, 4096)
    del wide["kv_lora_rank"]  # with which there are as many key heads as query heads
    assert narrow({**wide, "num_hidden_layers": 7, "vocab_size": 99, "kv_lora_rank": None}) == {
        **SMALL,
        "kv_lora_rank": None,
        "num_hidden_layers": 7,
        "vocab_size": 99,
    }
    assert SMALL["moe_intermediate_size"] == SMALL["shared_expert_intermediate_size"] == 64


@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def test_a_narrow_mixture_of_experts_is_a_member_of_its_family(model_type: str) -> None:
    from transformers import AutoConfig

    published = AutoConfig.for_model(model_type).to_dict()
    whole, small = (family_of(published).config(c) for c in (published, narrow(published)))
    assert len(small.layers) == len(whole.layers)
    assert small.moe
    assert whole.moe
    assert (small.dim, small.moe.experts, small.heads) == (64, 4, 4)
    assert small.moe.shared_intermediate_size < whole.moe.shared_intermediate_size
    assert (small.latent is None) == (whole.latent is None)
    if small.latent:
        assert (small.kv_heads, small.head_dim, small.value_dim) == (4, 32, 16)


def test_a_gpu_without_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(name="a GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: seen)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: 2)
    problems = []
    for nccl in (True, False):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda nccl=nccl: nccl)
        problems.append({f.name: f.problem for f in doctor.findings()}["collectives"])
    assert problems[0] == ""
    assert "no nccl" in problems[1]
