"""How a process finds out whether a Ray cluster wants a token, in one that is connected to none."""

import os
from pathlib import Path

from tests.child import run_python

CASES = Path(__file__).with_name("authentication_cases.py")


def test_a_cluster_is_asked_for_its_mode_before_ray_connects() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    done = run_python("-m", "pytest", "-q", str(CASES), cwd=CASES.parents[2], env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
