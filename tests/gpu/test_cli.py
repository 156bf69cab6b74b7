"""One SFT and one GRPO job as a user starts them: `ptf train JOB.yaml`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from tests.tiny import arithmetic, online

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_job_trains_and_writes_a_model(tmp_path, device, recipe):
    raw = arithmetic(tmp_path)
    raw["compute"]["device"] = device
    raw["train"] |= {"steps": 3, "precision": "bf16"}
    if recipe == "grpo":
        raw = online(raw, tmp_path, "ptf.rl.rewards:numeric", prompts_per_step=8)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "ptf.cli", "train", str(tmp_path / "job.yaml"), "--run-name", "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    run = Path(raw["output"]) / "a"
    assert len(read_metrics(run / "metrics.jsonl")) == 3
    assert (run / "model" / "model.safetensors").exists()
