"""Flows that train on Ray, and what is left of them when one of their processes is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from tests.child import run_python
from tests.flows.toy import ROOT, Toy, descendants, is_gone
from tests.tiny import arithmetic
from tests.waiting import until

OURS_S, RAYS_S = 10, 90  # Ray's helpers look only now and then whether they are still needed


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("who", ["run", "step"])
def test_nothing_outlives_a_flow_on_ray_that_is_killed(tmp_path, who, number):
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 100_000, "validate_every": 0}
    raw["compute"] = {"launcher": "ray", "workers": 2, "device": "cpu", "threads": 1, "timeout_s": 120}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "flow").mkdir()
    toy = Toy(tmp_path / "flow")
    line = [sys.executable, str(ROOT / "flows" / "sft_flow.py"), "run", "--config", str(tmp_path / "job.yaml")]
    run = subprocess.Popen(line, cwd=toy.directory, env=toy.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    there: dict[int, str] = {}
    try:
        until(
            lambda: any(len(file.read_text().splitlines()) > 3 for file in Path(raw["output"]).glob("*/metrics.jsonl")),
            seconds=240,
        )
        there = {pid: title(pid) for pid in [run.pid, *descendants(run.pid)]}
        task = next(pid for pid, said in there.items() if " step train " in said and pid != run.pid)
        os.kill(task if who == "step" else run.pid, number)
        killed = time.monotonic()
        run.wait(60)
        ours = [
            pid for pid, said in there.items() if "ray" not in said.replace(str(tmp_path), "").replace(str(ROOT), "")
        ]
        assert {run.pid, task} <= set(ours)
        until(lambda: all(map(is_gone, ours)), seconds=OURS_S - (time.monotonic() - killed) + 1)
        until(lambda: all(map(is_gone, there)), seconds=RAYS_S - (time.monotonic() - killed) + 1)
    finally:
        run.kill()
        for pid in there:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.cluster
def test_a_flow_on_ray_that_is_killed_in_the_middle_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 150, "validate_every": 0}
    raw["checkpoint"] = {"every": 20}
    raw["compute"] = {"launcher": "ray", "workers": 2, "device": "cpu", "threads": 1, "timeout_s": 300}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "flow").mkdir()
    toy, flow = Toy(tmp_path / "flow"), ROOT / "flows" / "sft_flow.py"
    words = ["run", "--config", str(tmp_path / "job.yaml"), "--run-id-file", str(tmp_path / "id")]
    line = [sys.executable, str(flow), *words]
    run = subprocess.Popen(line, cwd=toy.directory, env=toy.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(steps(tmp_path)) >= 45 or run.poll() is not None, seconds=480)
        assert run.poll() is None
    finally:
        run.kill()
        run.wait(60)
    before = steps(tmp_path)
    assert 45 <= len(before) < 150
    # the lease of who was killed is nobody's: no wait
    done = toy("resume", "--origin-run-id", (tmp_path / "id").read_text(), flow=flow, within_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert "published " in done.stdout
    assert steps(tmp_path) == list(range(1, 151))
    run_name = next(tmp_path.glob("runs/*/metrics.jsonl")).parent
    again = ["train", run_name / "job.yaml", "--set", f"output={tmp_path / 'other'}", "--run-name", "b"]
    run_python("-m", "ptf.cli", *again, env=toy.env, check=True, timeout=900)
    one, other = (place / "model" / "model.safetensors" for place in (run_name, tmp_path / "other" / "b"))
    assert one.read_bytes() == other.read_bytes()


def steps(where: Path) -> list[int]:
    return [row["step"] for file in where.glob("runs/*/metrics.jsonl") for row in read_metrics(file)]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""
