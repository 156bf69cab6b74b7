"""A tiny job of every recipe on a GPU, beside the same on the CPU; a resume; a GPU without enough memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.errors import UserError
from ptf.run import run
from tests.reliability.jobs import JOBS
from tests.tiny import arithmetic
from tests.train.test_loop import stopped

OFFLINE = ("SFT", "DPO", "DPO, reference found ahead", "RM", "KD", "KD, teacher asked ahead")
ONLINE = ("GRPO", "PPO", "OPD", "GRPO, k = 1", "GRPO, k = 4, episodes")


def rows(raw: dict[str, Any], name: str, device: str, precision: str = "fp32") -> list[dict[str, float]]:
    """The metrics of a run."""
    raw = {**raw, "compute": {**raw["compute"], "device": device}, "train": {**raw["train"], "precision": precision}}
    return read_metrics(run(loads(yaml.safe_dump(raw)), name) / "metrics.jsonl")


@pytest.mark.parametrize("name", OFFLINE)
def test_a_run_of_every_offline_recipe_follows_the_cpus(tmp_path: Path, device: str, name: str) -> None:
    raw = JOBS[name](tmp_path)
    there = [row["loss"] for row in rows(raw, "device", device)]
    assert there == pytest.approx([row["loss"] for row in rows(raw, "cpu", "cpu")], rel=2e-3, abs=1e-5)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_a_run_follows_the_cpus(tmp_path: Path, device: str, precision: str, bound: float) -> None:
    raw = arithmetic(tmp_path)
    there = [row["loss"] for row in rows(raw, "device", device, precision)]
    assert there == pytest.approx([row["loss"] for row in rows(raw, "cpu", "cpu")], rel=bound)


@pytest.mark.parametrize("name", ONLINE)
def test_engine_and_trainer_agree_in_every_online_recipe(tmp_path: Path, device: str, name: str) -> None:
    found = rows(JOBS[name](tmp_path), "device", device)
    assert len(found) == 6
    assert all(row["logprob_diff_max"] <= 1e-3 for row in found)
    assert all(torch.tensor(row["grad_norm"]).isfinite() for row in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, device: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = arithmetic(tmp_path)
    whole = rows(raw, "whole", device, precision)
    stopped(monkeypatch, 8, lambda: rows(raw, "stopped", device, precision))
    resumed = rows(raw, "stopped", device, precision)
    assert [row["step"] for row in resumed] == list(range(1, 13))
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in whole], rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_gpu_that_runs_out_of_memory_says_what_to_change(tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(UserError, match=r"out of memory .* lower train\.micro_batch_sequences"):
            rows(raw, "small", "cuda", "bf16")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
