"""A training run on one GPU: it learns what the CPU learns, and resumes."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("pydantic")

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.run import run
from tests.gpu.test_cli import GRPO
from tests.tiny import arithmetic


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_a_run_follows_the_cpus(tmp_path, precision, bound):
    raw = arithmetic(tmp_path)
    cpu = losses(run(loads(yaml.safe_dump(raw)), "cpu"))
    raw["compute"]["device"] = "cuda"
    raw["train"]["precision"] = precision
    gpu = losses(run(loads(yaml.safe_dump(raw)), "gpu"))
    assert gpu == pytest.approx(cpu, rel=bound)


def test_grpo_with_the_native_engine_agrees_with_itself(tmp_path):
    raw = arithmetic(tmp_path)
    raw |= GRPO
    raw["data"] = {
        **raw["data"],
        "sources": {"p": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "validation": {},
    }
    raw["train"] = {**raw["train"], "steps": 3}
    raw["compute"]["device"] = "cuda"
    rows = read_metrics(run(loads(yaml.safe_dump(raw)), "a") / "metrics.jsonl")
    assert all(row["logprob_diff_max"] <= 1e-3 for row in rows)
