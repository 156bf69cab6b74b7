"""`ptf plan --fit`: what it finds fits, nothing cheaper does, and why is said."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ptf.cli import main
from ptf.config import loads
from ptf.errors import UserError
from ptf.train.memory_search import MODES, Setting, search
from tests.train.test_budget import DENSE, directory, job


@dataclass
class Room:
    """A plan of a job of 8 units a GPU, which every change makes smaller."""

    units: float
    fits: bool


def planned(room: float, asked: list[Setting]):
    def plan(setting: Setting) -> Room:
        asked.append(setting)
        if setting.keys.get("compute.mesh.tensor_parallel_size") == "8":
            raise UserError("the heads are 4\nsecond line")
        mode = MODES.index(setting.keys.get("train.activation_checkpointing", "none"))
        rows = int(setting.keys.get("train.micro_batch_sequences", 4))
        fixed = 3.5 if "train.optimizer" in setting.keys else 4
        units = (
            (fixed + rows / (1 + mode))
            / setting.gpus
            / int(setting.keys.get("compute.mesh.tensor_parallel_size", 1)) ** 0.1
        )
        return Room(units, units <= room)

    return plan


@pytest.mark.parametrize("room", [9.0, 7.9, 6.1, 5.1, 4.4, 4.0, 2.0, 0.5])
def test_the_first_that_fits_costs_least(tmp_path: Path, room: float) -> None:
    asked: list[Setting] = []
    trials = list(search(loads(job(tmp_path)), 1, planned(room, asked)))
    assert trials[-1].fits
    assert not any(trial.fits for trial in trials[:-1])
    found = trials[-1].setting
    assert planned(room, [])(found).fits
    if room == 9.0:
        assert found == Setting(1, {})  # nothing needs to change
    if room == 4.4:
        assert found.keys == {"train.activation_checkpointing": "block", "train.micro_batch_sequences": "1"}
    if room == 4.0:
        assert found.gpus == 1
        assert found.keys["train.optimizer"] == "adamw_offload"
    if room < 3.8:  # no setting of one GPU fits, which one trial shows
        assert [trial.setting.gpus for trial in trials].count(1) == 1
        assert found.gpus > 1
    assert len(asked) <= len(trials) + 1


def test_a_document_that_no_gpu_holds_is_divided(tmp_path: Path) -> None:
    def plan(setting: Setting) -> Room:
        if "compute.mesh.tensor_parallel_size" in setting.keys:
            raise UserError("there is one key-value head")
        units = 8 / int(setting.keys.get("compute.mesh.context_parallel_size", 1))
        return Room(units, units <= 2)

    trials = list(search(loads(job(tmp_path)), 8, plan))
    assert trials[-1].fits
    assert trials[-1].setting == Setting(8, {"compute.mesh.context_parallel_size": "4"})


@pytest.mark.long
def test_what_is_found_for_256k_tokens_is_a_size_that_the_plan_confirms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory(tmp_path, {**DENSE, "num_key_value_heads": 1})
    file = tmp_path / "job.yaml"
    file.write_text(job(tmp_path, micro_batch_sequences=1, activation_checkpointing="block"))
    given = ["plan", str(file), "--gpu-memory-gib", "2.8", "--set", "data.seq_len=262144"]
    assert main([*given, "--workers", "8"]) == 1
    capsys.readouterr()
    assert main([*given, "--workers", "8", "--fit"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs, compute.mesh.tensor_parallel_size: 2" in text
    assert "--workers 8 --set compute.mesh.context_parallel_size=4" in text
    assert "× context 4 ×" in text
    assert "only for documents that do not fit a GPU" in text
    assert main([*given, "--workers", "8", "--set", "compute.mesh.context_parallel_size=2"]) == 1, "negative control"


def test_without_any_that_fits_every_number_of_gpus_was_tried(tmp_path: Path) -> None:
    trials = list(search(loads(job(tmp_path)), 8, planned(0.0, [])))
    assert not any(trial.fits for trial in trials)
    assert {trial.setting.gpus for trial in trials} == {8 * 2**n for n in range(7)}
    assert {trial.refused for trial in trials if trial.plan is None} == {"the heads are 4"}


@pytest.mark.long
def test_the_arguments_that_are_printed_make_the_job_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory(tmp_path, DENSE)
    file = tmp_path / "job.yaml"
    file.write_text(job(tmp_path))
    given = ["plan", str(file), "--gpu-memory-gib", "0.7"]
    assert main([*given, "--workers", "8"]) == 1
    assert main([*given, "--workers", "8", "--fit"]) == 0
    text = capsys.readouterr().out
    assert "GiB, of which activations take most" in text
    (line,) = [line for line in text.splitlines() if line.startswith("Give ")]
    assert main([*given, *line.removeprefix("Give ").split()]) == 0
    capsys.readouterr()
    assert main([*given, "--workers", "8", "--fit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    *others, last = found["tried"]
    assert last["fits"]
    assert all(not one["fits"] and "GiB" in one["why"] for one in others)
    assert found["memory_gib"]["step"]["total"] <= 0.7
    assert main(["plan", str(file), "--workers", "8", "--fit", "--roofline"]) == 2
    assert "give --fit first" in capsys.readouterr().err
    assert main([*given, "--workers", "3", "--fit", "--set", "compute.mesh.tensor_parallel_size=3"]) == 2
    assert "found no setting that the job can have:\n3 GPUs" in capsys.readouterr().err
    assert main(["plan", str(file), "--workers", "8", "--gpu-memory-gib", "0.01", "--fit"]) == 1
    assert "nothing that was tried fits" in capsys.readouterr().out
