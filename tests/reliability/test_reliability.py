"""A handful of what benchmarks/reliability.py does in full: a killed run ends as one that never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_runs_end_as_one_that_never_stopped(tmp_path: Path) -> None:
    traps = ["phase:40", "phase:101", "file:9", "file:30", "bytes:3000", "bytes:200000"]
    command = [sys.executable, "-m", "tests.reliability.kills", str(tmp_path), *traps]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reached, different = map(json.loads, done.stdout.splitlines()[-2:])
    assert len(reached) == len(traps)
    assert different == {}


def test_of_two_resumes_at_once_one_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The other says who holds the run; where that one is killed too, the next goes on at once."""
    command = [sys.executable, "-m", "tests.reliability.resumes", str(tmp_path), "disk", "3"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["wrong"] for one in found] == [[], [], []]
    assert sum(one["refused"] for one in found) >= 1
