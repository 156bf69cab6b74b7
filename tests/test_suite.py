"""The suite itself: which tests share a process, that it draws the same examples every time,
and how its memory is measured."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.child import run_python
from tests.conftest import ROOT, scope


def test_all_that_uses_ray_shares_a_process(request: pytest.FixtureRequest) -> None:
    """Otherwise every process of `pytest -n` starts a Ray of its own, and engines beside one another."""
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if item.get_closest_marker("ray") or "ray_cluster" in item.fixturenames:
            assert scope(item.nodeid) == "ray", item.nodeid
    assert scope("tests/e2e/test_main_job.py::test_grpo_on_vllm_syncs_every_step_and_continues_after_a_kill") == "ray"
    assert scope("tests/compute/test_gang.py::test_environment_of_the_workers") == "ray"
    assert scope("tests/compute/test_heartbeat.py::test_a") != "ray"  # another test of that file uses it
    assert scope(request.node.nodeid) == request.node.nodeid  # negative control


def test_all_that_uses_a_fixture_of_a_module_shares_a_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process makes it: for example the data of tests/data/test_loader.py."""
    shared = set[str]()
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        file, _, _ = item.nodeid.partition("::")
        made = [one for found in item._fixtureinfo.name2fixturedefs.values() for one in found if one.baseid == file]
        if any(one.scope == "module" for one in made):
            assert scope(item.nodeid) in (file, "ray"), item.nodeid
            shared.add(file)
        elif scope(item.nodeid) != "ray":
            assert scope(item.nodeid) == item.nodeid
    if len(request.session.items) > 1000:  # the whole suite
        assert "tests/data/test_loader.py" in shared


def drawn(profile: str) -> list[int]:
    found: list[int] = []
    settings(settings.get_profile(profile), max_examples=5)(given(st.integers())(lambda number: found.append(number)))()
    return found


def test_the_suite_draws_the_same_examples_every_time() -> None:
    assert settings.default is settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
    assert drawn("fixed") == drawn("fixed")
    assert any(drawn("random") != drawn("random") for _ in range(5))  # negative control


DAEMON = """
import os, time
def test_that_leaves_a_process_behind():
    made, ends = os.pipe(), os.pipe()
    if os.fork() == 0:
        if os.fork():
            os._exit(0)  # the process below has lost its parent
        os.setsid()
        os.close(ends[1])
        held = os.urandom(1 << 20) * 256
        os.write(made[1], b"made")
        os.read(ends[0], 1)  # until pytest ends
        os._exit(0)
    os.wait()
    os.read(made[0], 4)
    time.sleep(0.5)
"""


@pytest.mark.parametrize(("limit", "status"), [(0.2, 1), (8.0, 0)])
def test_memory_of_orphans_is_the_suites(tmp_path: Path, limit: float, status: int) -> None:
    (tmp_path / "test_daemon.py").write_text(DAEMON)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    asked = ["--limit", limit, "--interval", 0.05, "-q", "-p", "no:cacheprovider", "test_daemon.py"]
    done = run_python(ROOT / "benchmarks" / "suite_memory.py", *asked, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    peak, *_ = done.stdout.partition("Peak PSS ")[2].split()
    assert 0.25 < float(peak) < 0.5
    assert "test_daemon.py::test_that_leaves_a_process_behind" in done.stdout
    assert ("above the limit" in done.stdout) == (status == 1)
