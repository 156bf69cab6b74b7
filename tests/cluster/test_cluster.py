"""Clusters of more than one node, and jobs that outlive whoever submitted them: `make test-cluster`,
for each starts a cluster of its own."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from tests.cluster.head import running
from tests.tiny import arithmetic
from tests.waiting import until

pytestmark = pytest.mark.cluster
PTF = Path(sys.executable).with_name("ptf")


def rows(directory: Path) -> list[int]:
    return [row["step"] for row in read_metrics(directory / "metrics.jsonl")]


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


@pytest.fixture
def nodes(token: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without places, and two nodes of two."""
    import ptf.compute.ray_session  # noqa: F401

    # isort: split
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        monkeypatch.setenv("RAY_TMPDIR", home)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        yield cluster
        cluster.shutdown()


def test_a_gang_over_two_nodes_survives_the_loss_of_one(
    nodes: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    from ptf.run import run

    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 150, "validate_every": 0}
    raw["checkpoint"] = {"every": 10}
    raw["compute"] = {"launcher": "ray", "address": nodes.address, "workers": 4, "threads": 1, "device": "cpu"}
    job, directory = loads(yaml.safe_dump(raw)), Path(raw["output"]) / "a"
    seen: dict[str, Any] = {}

    def take_one_away() -> None:
        until(lambda: len(rows(directory)) >= 35, 240)
        tables = ray.util.placement_group_table().values()
        seen["nodes"] = {
            node for table in tables if table["state"] == "CREATED" for node in table["bundles_to_node_id"].values()
        }
        seen["at"] = time.monotonic()
        nodes.remove_node(sorted(nodes.worker_nodes, key=id)[0], allow_graceful=False)

    helper = threading.Thread(target=take_one_away)
    helper.start()
    with pytest.raises(RuntimeError, match=r"train rank \d .*(died|not)") as caught:
        run(job, "a")
    seen["told"] = time.monotonic()
    helper.join()
    assert len(seen["nodes"]) == 2
    done = rows(directory)
    assert 35 <= len(done) < 150
    print(f"{seen['told'] - seen['at']:.1f} s after the node was gone: {str(caught.value)[:200]}")
    nodes.add_node(num_cpus=2)
    run(job, "a")
    assert rows(directory) == list(range(1, 151))
    out = capfd.readouterr().out
    assert "resumed from" in out


@pytest.fixture
def head(token: None) -> Iterator[str]:
    """Where a cluster with a token takes jobs."""
    with running({name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}) as started:
        yield started.jobs


def test_a_submitted_job_outlives_its_driver_and_is_found_again(head: str, tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 3000, "validate_every": 0}
    raw["checkpoint"] = {"every": 200}
    raw["compute"] = {"launcher": "ray", "address": head, "workers": 2, "threads": 1, "device": "cpu"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    directory, command = Path(raw["output"]) / "a", [str(PTF), "train", str(tmp_path / "job.yaml"), "--run-name", "a"]
    with (tmp_path / "first.log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: len(rows(directory)) >= 20 or driver.poll() is not None, 240)
        assert driver.poll() is None, (tmp_path / "first.log").read_text()[-3000:]
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(20)
    before = len(rows(directory))
    until(lambda: len(rows(directory)) > before + 20, 240)  # without it
    again = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert f"job ptf-a-train is running on {head}: following it" in again.stdout
    assert "resumed from" not in again.stdout
    assert rows(directory) == list(range(1, 3001))
    assert (directory / "model" / "model.safetensors").exists()
