"""What is run on the first GPU is run here first, on the CPU: `make test-gpu` and `make bench-gpu`."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.child import run_python

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    done = run_python(*command, cwd=ROOT, env={**os.environ, "PTF_GPU_TESTS": "cpu"}, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_the_tests_of_a_gpu_pass_on_a_cpu():
    out = run("-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:tests.leftovers", "-p", "no:xdist")
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed.group(1)) >= 14
    assert "failed" not in out


def test_the_benchmark_of_a_gpu_trains_a_tiny_model_on_a_cpu():
    out = run("benchmarks/gpu_sft.py", "--device", "cpu", "--shapes", "Qwen3-0.6B", "--seq-len", "256", "--steps", "2")
    row = json.loads(out.splitlines()[0])
    assert row["steps"] == 2
    assert row["tokens_per_s"] > 0
    assert row["mfu"] > 0  # of the peak as it was measured, beside other work
    assert "| Qwen3-0.6B |" in out
