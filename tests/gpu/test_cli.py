"""One SFT and one GRPO job as a user starts them: `ptf train JOB.yaml`."""

from pathlib import Path

import pytest

from ptf.compute.tracking import read_metrics
from tests.child import run_python
from tests.tiny import arithmetic, job_file, online

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_job_trains_and_writes_a_model(tmp_path, device, recipe):
    raw = arithmetic(tmp_path)
    raw["compute"]["device"] = device
    raw["train"] |= {"steps": 3, "precision": "bf16"}
    if recipe == "grpo":
        raw = online(raw, tmp_path, "ptf.rl.rewards:numeric", prompts_per_step=8)
    line = ["train", job_file(raw, tmp_path), "--run-name", "a"]
    done = run_python("-m", "ptf.cli", *line, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    run = Path(raw["output"]) / "a"
    assert len(read_metrics(run / "metrics.jsonl")) == 3
    assert (run / "model" / "model.safetensors").exists()
