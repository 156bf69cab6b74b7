"""GRPO on Ray with the engines on a GPU, as a user starts it, where ray, verl and vLLM are installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ptf.compute.tracking import read_metrics
from tests.child import run_python
from tests.gpu.test_cli import ROOT
from tests.tiny import arithmetic, configured, job_file, online

WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WIDE |= {"intermediate_size": 512, "max_position_embeddings": 256}
LORA = {"lora": {"rank": 8, "alpha": 16}}
# name → rollout, model, precision, and the largest mean difference of log-probs between engine and trainer
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str, float]] = {
    "native": ({"engine": "native"}, {}, "fp32", 1e-4),
    "vllm": ({}, {}, "bf16", 0.03),
    "vllm, fp32": ({}, {}, "fp32", 1e-3),
    "vllm, adapter": ({}, LORA, "bf16", 0.03),
    "vllm, files": ({"transport": "files"}, {}, "bf16", 0.03),
    "vllm, object store": ({"transport": "object_store"}, {}, "bf16", 0.03),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("name", RUNS)
def test_policy_and_engine_stay_one_policy_on_a_gpu(tmp_path: Path, name: str) -> None:
    for package in ("ray", "verl", *(["vllm"] if name.startswith("vllm") else [])):
        pytest.importorskip(package, reason=f"{package} is not installed")
    rollout, model, precision, bound = RUNS[name]
    raw = arithmetic(tmp_path)
    configured(Path(raw["model"]["path"]), **WIDE)
    rollout = {"engine": "vllm", "prompts_per_step": 8, "gpu_memory_utilization": 0.1, **rollout}
    raw = online(raw, tmp_path, "ptf.rl.rewards:numeric", **rollout) | {"algo": {"num_minibatches": 2}}
    raw["evaluate"] = {"sources": {"dev": raw["data"]["sources"]["p"]}, "limit": 20}
    raw["model"] = {**raw["model"], **model}
    raw["train"] |= {"steps": 4, "precision": precision, "validate_every": 2}
    raw["compute"] = {"launcher": "ray", "device": "cuda", "threads": 2}
    line = ["train", job_file(raw, tmp_path), "--run-name", "a"]
    done = run_python("-m", "ptf.cli", *line, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    rows = read_metrics(Path(raw["output"]) / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    print(name, [(row["logprob_diff_mean"], row["logprob_diff_max"], row["step_s"]) for row in rows])
    assert max(row["logprob_diff_mean"] for row in rows) <= bound
    assert (Path(raw["output"]) / "a" / "model").exists()
