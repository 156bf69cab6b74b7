"""What tests share: one Ray (starting it takes 3-8 s, and every test gives its places back), and the real data, where
PTF_DATA has it; and which of them go one after the other where there are several processes (`pytest -n 2`)."""

import ast
import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.leftovers"]

# no test asserts a time; `make test` draws the same examples every time, `make test-random` others
settings.register_profile("fixed", deadline=None, database=None, derandomize=True)
settings.register_profile("random", deadline=None, database=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each: threads of several processes would spin for their turn
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "token"  # before any test module imports ray, which reads it once
os.environ["PTF_CACHE"] = tempfile.mkdtemp(prefix="ptf-cache-")  # what is verified is remembered here
atexit.register(shutil.rmtree, os.environ["PTF_CACHE"], ignore_errors=True)
# No test takes the power away, and a kill loses nothing that the kernel has. A training run syncs 40 to 120 times, at
# 4.5 ms on the disk of a 2-core virtual machine. Processes that tests start by a command line sync.
os.fsync = os.fstat
ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("PTF_DATA") or Path(__file__).parents[2] / "shared" / "data")


@cache
def sharing(file: str) -> dict[str, str]:
    """Test functions of this file, named from the root, that are not by themselves with `pytest -n` → what they share a
    process with: Ray and what starts it, or the file's fixtures for the whole module, which each process would make."""
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)]
    all_on_ray = file.startswith("tests/e2e/") or any("mark.ray" in ast.unparse(mark) for mark in marks)
    found = {}
    for test in (name for name in functions if name.startswith("test_")):
        used, new = set[str](), {test}
        while new:  # fixtures, and theirs
            used |= new
            new = {arg.arg for name in new if name in functions for arg in functions[name].args.args} - used
        decorators = {
            name: " ".join(map(ast.unparse, functions[name].decorator_list)) for name in used & set(functions)
        }
        if all_on_ray or "ray_cluster" in used or "mark.ray" in decorators[test]:
            found[test] = "ray"
        elif any("scope='module'" in text for text in decorators.values()):
            found[test] = file
    return found


def scope(nodeid: str) -> str:
    """What shares a process with `pytest -n`: all that uses Ray, so that there is one Ray and one engine at a time; and
    tests with the same fixtures for a module, so that these are made once. Any other test is by itself."""
    file, _, name = nodeid.partition("::")
    return sharing(file).get(name.partition("[")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadgroup` would do, but pytest 9.2 does not let xdist 3.8 rename tests,
    which is how that tells groups: every test was alone."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Scheduling(config, log)  # type: ignore[arg-type]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what the imports and the collection made, more than a million objects, out of the searches of the garbage
    collector."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws from torch's own generator does not depend on the tests that this process ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # torch.manual_seed formats four stacks, without a GPU


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from ptf.compute.ray_session import ray_session

    workdir: Path = tmp_path_factory.mktemp("ray")
    with ray_session(workdir=workdir, cpus=8, timeout_s=600):
        yield


@pytest.fixture(scope="session")
def vllm_caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where vLLM keeps what it found out about a model's class, for which it starts a process that imports it again."""
    return tmp_path_factory.mktemp("vllm-caches")


class RealData(type(Path())):
    """A directory of which a part may be missing: a test that asks for such a file is skipped there."""

    def __truediv__(self, name: str) -> "RealData":
        found = super().__truediv__(name)
        if not found.exists():
            pytest.skip(f"needs {name} of the real data: `make data`, or point PTF_DATA at it")
        return found


@pytest.fixture(scope="session")
def shared() -> Path:
    if not (SHARED / "templates").is_dir():
        pytest.skip("needs the real data: `make data`, or point PTF_DATA at it")
    return RealData(SHARED)
