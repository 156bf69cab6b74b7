"""What a process imports before it works, by name: a heavy import that comes back to a command, to a reward's process
or to a rank is found here. What each costs: benchmarks/startup.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.child import run_python

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["numpy", "torch", "transformers", "tokenizers", "pyarrow", "pandas", "fsspec", "httpx", "rich", "ray", "verl"]
OF_A_RANK = ["ray", "verl", "vllm", "pandas", "scipy", "sklearn", "datasets", "tensorboard", "metaflow"]
OF_A_RANK += ["torch._dynamo", "torch._inductor", "transformers.generation.utils", "transformers.models.auto"]
COMMAND = """
import sys
from ptf.cli import main
try:
    status = main({!r})
except SystemExit as end:
    status = end.code
assert status in (0, None), status
"""
SHOW = "\nimport json, sys; print(json.dumps([name for name in {!r} if name in sys.modules]))"
PROCESSES = {
    "help": (COMMAND.format(["--help"]), [*HEAVY, "pydantic", "yaml"]),
    "check sft": (COMMAND.format(["check", "configs/tiny/sft.yaml"]), HEAVY),
    "check grpo": (COMMAND.format(["check", "configs/tiny/grpo.yaml"]), HEAVY),
    # a reward may ask for its episode, which has arrays of numpy
    "reward": ("import ptf.rl.worker_server, ptf.rl.rewards.functions, ptf.tasks.arithmetic", HEAVY[1:]),
    "rank": ("import ptf.run, ptf.train.loop, ptf.recipes.sft.recipe", OF_A_RANK),
}


def imported(code: str, names: Sequence[str]) -> list[str]:
    """Which of these modules a process that runs the code has imported."""
    run = [sys.executable, "-c", code + SHOW.format(names)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_nothing_heavy_that_it_does_not_need(process: str) -> None:
    assert imported(*PROCESSES[process]) == []


def test_a_heavy_import_is_found() -> None:
    assert imported("import ptf.data.packing", HEAVY) == ["numpy"]  # the control


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(environment, expected):
    ours = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    shown = "import json, os, ptf; print(json.dumps(os.environ.get('GOMP_SPINCOUNT')))"
    done = run_python("-c", shown, cwd=ROOT, env=ours | environment, check=True)
    assert json.loads(done.stdout) == expected
