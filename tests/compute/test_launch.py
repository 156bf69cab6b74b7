"""One worker on this machine is this process: it trains and is evaluated without Ray,
whatever the launcher is by default."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf.compute.launch import needs_ray
from ptf.config.sections.compute import ComputeConfig
from tests.tiny import arithmetic

CODE = """
    import sys
    from pathlib import Path
    from ptf.config import load
    from ptf.measurement import measure_run
    from ptf.run import run
    job = load(sys.argv[1])
    directory = run(job, "a")
    assert "loss/held_out" in measure_run(job, directory)
    print("RAY", "ray" in sys.modules, "verl" in sys.modules)
"""


def test_one_worker_trains_and_is_evaluated_without_ray(tmp_path: Path) -> None:
    raw: dict[str, Any] = arithmetic(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    raw["compute"] = {"device": "cpu", "threads": 1}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
        timeout=300,
    )
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
