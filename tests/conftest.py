"""The one Ray that all tests of a session share: starting it takes 3-8 s, and every test gives its places back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ptf", deadline=None)  # no test asserts a time
settings.load_profile("ptf")
os.environ["RAY_AUTH_MODE"] = "token"  # before any test module imports ray, which reads it once


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from ptf.compute.ray_session import ray_session

    workdir: Path = tmp_path_factory.mktemp("ray")
    with ray_session(workdir=workdir, cpus=8, timeout_s=600):
        yield
