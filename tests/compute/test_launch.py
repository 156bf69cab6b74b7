"""One worker on this machine is this process: it trains and is evaluated without Ray,
whatever the launcher is by default."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from ptf.compute import launch
from ptf.compute.launch import needs_ray
from ptf.compute.ray_session import _resolved
from ptf.config.sections.compute import ComputeConfig
from ptf.errors import UserError
from tests.child import run_python
from tests.tiny import arithmetic, job_file

CODE = """
    import sys
    from pathlib import Path
    from ptf.config import load
    from ptf.evaluate.measurement import measure_run
    from ptf.run import run
    job = load(sys.argv[1])
    directory = run(job, "a")
    assert "loss/held_out" in measure_run(job, directory)
    print("RAY", "ray" in sys.modules, "verl" in sys.modules)
"""


@pytest.mark.long
def test_one_worker_trains_and_is_evaluated_without_ray(tmp_path: Path) -> None:
    raw: dict[str, Any] = arithmetic(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    raw["compute"] = {"device": "cpu", "threads": 1}
    done = run_python("-c", textwrap.dedent(CODE), job_file(raw, tmp_path), timeout=300)
    assert "RAY False False" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"launcher": "local"}, False),
        ({"launcher": "torchrun", "workers": 2}, False),
        ({"workers": 2}, True),
        ({"address": "head:6379"}, True),  # one worker, but over there
    ],
)
def test_who_needs_ray(given: dict[str, Any], expected: bool) -> None:
    assert needs_ray(ComputeConfig(**given)) is expected


def test_ranks_of_torchrun_are_told_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OMP_NUM_THREADS torchrun sets it to 1 for all ranks."""
    started: list[dict[str, str]] = []

    class Started(Exception):
        pass

    def start(module: str, arguments: object, environment: dict[str, str]) -> None:
        assert module == "torch.distributed.run"
        started.append(environment)
        raise Started

    monkeypatch.setattr(launch, "start", start)
    with pytest.raises(Started):
        launch.torchrun([], ComputeConfig(launcher="torchrun", workers=2, threads=3), tmp_path)
    assert started[0]["OMP_NUM_THREADS"] == "3"
    assert started[0][launch.ADDRESS].startswith("127.0.0.1:")


def test_threads_are_the_cores_of_a_machine_divided_by_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for name in launch.LOCAL_SIZE:
        monkeypatch.delenv(name, raising=False)
    assert launch.default_threads() == 64
    monkeypatch.setenv("WORLD_SIZE", "32")  # on four nodes
    assert launch.default_threads() == 2, "nobody says how many of them are here"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert launch.default_threads() == 8
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "16")
    assert launch.default_threads() == 4
    assert launch.default_threads(100) == 1


def test_the_address_of_a_cluster_is_the_given_one_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _resolved("head:6379") == "head:6379"
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6380")
    assert _resolved("auto") == "192.0.2.7:6380"
    with pytest.raises(UserError, match="write host:port"):
        _resolved("head")
