"""Flows that train on Ray, and what is left of them when one of their processes is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.flows.toy import ROOT, Toy, descendants, is_gone, wait_for
from tests.tiny import arithmetic

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
        wait_for(lambda: any(len(file.read_text().splitlines()) > 3 for file in Path(raw["output"]).glob("*/metrics.jsonl")), seconds=240)
        there = {pid: title(pid) for pid in [run.pid, *descendants(run.pid)]}
        task = next(pid for pid, said in there.items() if " step train " in said and pid != run.pid)
        os.kill(task if who == "step" else run.pid, number)
        killed = time.monotonic()
        run.wait(60)
        ours = [pid for pid, said in there.items() if "ray" not in said.replace(str(tmp_path), "").replace(str(ROOT), "")]
        assert {run.pid, task} <= set(ours)
        wait_for(lambda: all(map(is_gone, ours)), seconds=OURS_S - (time.monotonic() - killed) + 1)
        wait_for(lambda: all(map(is_gone, there)), seconds=RAYS_S - (time.monotonic() - killed) + 1)
    finally:
        run.kill()
        for pid in there:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""
