"""What tests share: one Ray (starting it takes 3-8 s, and every test gives its places back), and the real data, where PTF_DATA has it; and which of
them go one after the other where there are several processes (`pytest -n 2`)."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ptf", deadline=None)  # no test asserts a time
settings.load_profile("ptf")
os.environ["RAY_AUTH_MODE"] = "token"  # before any test module imports ray, which reads it once
os.environ["PTF_CACHE"] = tempfile.mkdtemp(prefix="ptf-cache-")  # what is verified is remembered here
atexit.register(shutil.rmtree, os.environ["PTF_CACHE"], ignore_errors=True)
SHARED = Path(os.environ.get("PTF_DATA") or Path(__file__).parents[2] / "shared" / "data")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, a file's tests share a process, for they share fixtures; all that start Ray share one, so that there is one Ray."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            assert isinstance(item, pytest.Function)
            ray = item.get_closest_marker("ray") or "ray_cluster" in item.fixturenames or "e2e" in item.path.parts
            item.add_marker(pytest.mark.xdist_group("ray" if ray else str(item.path)))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from ptf.compute.ray_session import ray_session

    workdir: Path = tmp_path_factory.mktemp("ray")
    with ray_session(workdir=workdir, cpus=8, timeout_s=600):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    if not (SHARED / "templates").is_dir():
        pytest.skip("needs the real data: point PTF_DATA at it")
    return SHARED
