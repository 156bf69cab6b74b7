"""A handful of what benchmarks/reliability.py does in full: a killed run ends as one that never stopped, and no damaged checkpoint is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ptf.config import loads
from ptf.run import run
from tests.reliability.kills import job
from tests.reliability.mutations import MUTATIONS, sweep

ROOT = Path(__file__).parents[2]


def test_killed_runs_end_as_one_that_never_stopped(tmp_path: Path) -> None:
    traps = ["phase:40", "phase:101", "file:9", "file:30", "bytes:3000", "bytes:200000"]
    command = [sys.executable, "-m", "tests.reliability.kills", str(tmp_path), *traps]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reached, different = map(json.loads, done.stdout.splitlines()[-2:])
    assert len(reached) == len(traps)
    assert different == {}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = job(tmp_path_factory.mktemp("mutations"))
    raw["checkpoint"]["keep"] = 3
    return run(loads(yaml.safe_dump(raw)), "whole") / "checkpoints"


def test_no_damaged_checkpoint_is_loaded(checkpoints: Path, tmp_path: Path) -> None:
    outcomes, silent = sweep(checkpoints, tmp_path, 60)
    assert silent == []
    assert outcomes["one before it"] > 5


def test_the_sweep_sees_a_silent_load(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without reading the files, only their sizes are known."""
    from ptf import storage

    whole = storage.verify
    monkeypatch.setattr(storage, "verify", lambda directory, up_to=0.0: whole(directory, 0.0))
    monkeypatch.setattr("tests.reliability.mutations.MUTATIONS", {"flip": MUTATIONS["flip"]})
    assert sweep(checkpoints, tmp_path, 20)[1]


def test_of_two_resumes_at_once_one_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The other says who holds the run; where that one is killed too, the next goes on at once."""
    command = [sys.executable, "-m", "tests.reliability.resumes", str(tmp_path), "disk", "3"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["wrong"] for one in found] == [[], [], []]
    assert sum(one["refused"] for one in found) >= 1
