"""The suite itself: which tests share a process, and that it draws the same examples every time."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import scope


def test_all_that_uses_ray_shares_a_process(request: pytest.FixtureRequest) -> None:
    """Otherwise every process of `pytest -n` starts a Ray of its own, and engines beside one another."""
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if item.get_closest_marker("ray") or "ray_cluster" in item.fixturenames:
            assert scope(item.nodeid) == "ray", item.nodeid
    assert scope("tests/compute/test_gang.py::test_a") == scope("tests/e2e/test_main_job.py::test_b") == "ray"
    assert scope(request.node.nodeid) == request.node.nodeid  # negative control


def drawn(profile: str) -> list[int]:
    found: list[int] = []
    settings(settings.get_profile(profile), max_examples=5)(given(st.integers())(lambda number: found.append(number)))()
    return found


def test_the_suite_draws_the_same_examples_every_time() -> None:
    assert settings.default is settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
    assert drawn("fixed") == drawn("fixed")
    assert any(drawn("random") != drawn("random") for _ in range(5))  # negative control
