"""`auto` becomes what suits the devices, and a run keeps it."""

from pathlib import Path

import pytest
import torch
import yaml

from ptf import api
from ptf.compute import device_defaults
from ptf.compute.device_defaults import multiplies_bf16, settled
from ptf.compute.tracking import read_metrics
from ptf.config import Job, loads
from ptf.inspection import doctor
from ptf.rl.engines import native
from ptf.run import begun_job, read_job_file, run, write_job_file
from tests.tiny import arithmetic, online

AVX2 = "flags\t\t: fpu sse4_2 avx avx2 fma\n"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (AVX2, False),
        ("flags\t\t: avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: avx512f amx_bf16\n", True),
        ("Features\t: fp asimd bf16 sve\n", True),
        ("Features\t: fp asimd\nmodel name\t: bf16\n", False),
        ("", False),
    ],
)
def test_the_units_of_a_cpu(tmp_path: Path, flags: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}")
    assert multiplies_bf16(tmp_path / "cpuinfo") is found
    assert not multiplies_bf16(tmp_path / "of no Linux")


@pytest.fixture
def raw(tmp_path: Path) -> dict:
    raw = arithmetic(tmp_path)
    del raw["train"]["precision"]
    return raw


def job_of(raw: dict, **compute: object) -> Job:
    return loads(yaml.safe_dump({**raw, "compute": {**raw["compute"], **compute}}))


def with_units(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(device_defaults, "multiplies_bf16", lambda: there)


def test_the_precision_is_what_the_device_has_units_for(raw: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def precision(device: str) -> str:
        return settled(job_of(raw, device=device), tell=said.append).train.precision

    for there, on_cpu in ((True, "bf16"), (False, "fp32")):
        with_units(monkeypatch, there)
        assert (precision("cuda"), precision("cpu")) == ("bf16", on_cpu)
    assert said == ["train.precision: auto is fp32 here, because this CPU has no units for bf16"]
    raw["train"]["precision"] = "bf16"
    assert precision("cpu") == "bf16", "what is named is kept"


def test_the_engine_is_the_one_for_the_device_unless_the_job_needs_the_other(raw: dict, tmp_path: Path) -> None:
    raw = online(raw, tmp_path)
    del raw["rollout"]["engine"]

    def engine(rollout: dict | None = None, **compute: object) -> object:
        job = job_of({**raw, "rollout": {**raw["rollout"], **(rollout or {})}}, **compute)
        found = settled(job).rollout
        assert found
        return found.engine

    assert engine(device="cpu") == "native"
    assert engine(device="cuda", launcher="ray") == "vllm"
    assert engine(device="cuda", launcher="local") == "native", "vLLM needs a process of its own"
    assert engine({"tensor_parallel_size": 2}, device="cpu", launcher="ray") == "vllm", "which alone divides a model"
    assert engine({"engine": "vllm"}, device="cpu", launcher="ray") == "vllm"


def test_a_run_goes_on_in_the_precision_that_it_began_with(
    raw: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw["train"] |= {"steps": 2, "validate_every": 0}
    with_units(monkeypatch, False)
    directory = run(job_of(raw), "a")
    assert "train.precision: auto is fp32 here" in capsys.readouterr().out
    assert loads(str(read_job_file(directory))).train.precision == "fp32"
    assert all(row["mfu"] <= 1 for row in read_metrics(directory / "metrics.jsonl") if "mfu" in row)
    with_units(monkeypatch, True)
    run(job_of(raw), "a")  # on a machine with the units; another precision would be refused
    assert loads(str(read_job_file(directory))).train.precision == "fp32"


def test_a_run_that_made_no_step_does_not_fix_the_precision(raw: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(raw["output"]) / "a"
    write_job_file(loads(yaml.safe_dump(raw | {"train": {**raw["train"], "precision": "fp32"}})), directory)
    with_units(monkeypatch, True)
    assert settled(job_of(raw), begun_job(directory)).train.precision == "bf16"
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    assert settled(job_of(raw), begun_job(directory)).train.precision == "fp32"


def test_check_and_doctor_say_so(raw: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with_units(monkeypatch, False)
    monkeypatch.setattr(doctor, "multiplies_bf16", lambda: False)
    assert "train.precision: auto is fp32 here" in api.check(job_of(raw))
    cpu = {finding.name: finding.problem for finding in doctor._devices()}["CPU"]
    assert cpu == "no bf16 in hardware: train.precision: auto is fp32"


def test_a_model_is_served_in_fp32_where_bf16_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "bfloat16"}')
    for there, on_cpu in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(native, "multiplies_bf16", lambda there=there: there)
        assert (native.served_dtype(tmp_path, cpu), native.served_dtype(tmp_path, gpu)) == (on_cpu, torch.bfloat16)
    assert capsys.readouterr().out == "this CPU has no units for bf16: the model computes in fp32\n"
