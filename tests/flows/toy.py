"""Runs the toy flow as a process of its own, in a directory of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import until

FLOW = Path(__file__).with_name("toy_flow.py")
ROOT = FLOW.parents[2]


class Toy:
    """`toy("run", "--set", "train.lr=1")` in `directory`, whose `.metaflow` and HOME it has to itself."""

    def __init__(self, directory: Path):
        self.directory, self.home = directory, directory / "home"
        self.home.mkdir()
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("METAFLOW_", "PTF_", "RAY_"))}
        self.env = keep | {
            "HOME": str(self.home),
            "TMPDIR": str(directory),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(directory),
            "METAFLOW_CLIENT_CACHE_PATH": str(directory / "cache"),
        }

    def __call__(
        self, *words: str, act: str = "", flow: Path = FLOW, within_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(flow), *words]
        return subprocess.run(
            line, cwd=self.directory, env=self.env | {"TOY": act}, capture_output=True, text=True, timeout=within_s
        )

    def until_training(self, *words: str) -> "tuple[subprocess.Popen[str], int]":
        """Start it, wait until its train step hangs; the process of the run, and the pid of the task."""
        before, line = len(self.trained()), [sys.executable, str(FLOW), *words]
        run = subprocess.Popen(
            line,
            cwd=self.directory,
            env=self.env | {"TOY": "hang"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: len(self.trained()) > before or run.poll() is not None)
        assert run.poll() is None, run.communicate()
        return run, self.trained()[-1]["pid"]

    def trained(self) -> list[dict]:
        file = self.directory / "trained.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_gone(pid: int) -> bool:
    """No such process, or one that only waits for init to take note."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
