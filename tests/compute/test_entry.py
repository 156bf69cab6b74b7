"""No process outlives who started it: not one that still imports, nor one whose parent was gone before its first line.
The control: without `ptf.workspace.entry`, both do."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ptf.data import tokenized
from ptf.workspace.entry import PARENT, PATH
from tests.waiting import until

WITHIN_S = 60.0
STALLS = """
import os, sys, time
go = os.environ.get("STALL_UNTIL")
if go and ("STALL_RANKS" not in os.environ or "RANK" in os.environ):
    open(f"{go}.at.{os.getpid()}", "w").close()
    while not os.path.exists(go):
        time.sleep(0.02)
    sys.addaudithook(lambda event, given: event == "import" and given[0] == "torch"
                     and open(f"{go}.torch", "w").close())
"""
SLOW = """
import os, pathlib, time
pathlib.Path(os.environ["BEGUN"]).touch()
time.sleep(600)
"""
DRIVER = """
import subprocess, sys, time
from ptf.compute import launch
how, environment = sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:])
if how == "entry":
    launch.start("slow", [], environment)
elif how == "bare":
    subprocess.Popen([sys.executable, "-m", "slow"], env={**__import__("os").environ, **environment})
elif how == "torchrun":
    import os, pathlib
    from ptf.config.sections.compute import ComputeConfig
    os.environ.update(environment)
    compute = ComputeConfig(launcher="torchrun", workers=2, threads=1, timeout_s=600)
    launch.torchrun(["missing.yaml"], compute, pathlib.Path())
time.sleep(600)
"""


class Family:
    """A driver and what it started, ended at last by the test if by nobody else."""

    def __init__(self, place: Path) -> None:
        self.place, self.go, self.begun = place, place / "go", place / "begun"
        self.drivers: list[subprocess.Popen] = []
        self.seen: list[psutil.Process] = []
        for name, text in {"sitecustomize": STALLS, "slow": SLOW, "driver": DRIVER}.items():
            (place / f"{name}.py").write_text(text)

    def start(self, how: str, **environment: object) -> subprocess.Popen:
        command = [
            sys.executable,
            str(self.place / "driver.py"),
            how,
            *(f"{name}={value}" for name, value in environment.items()),
        ]
        path = os.pathsep.join([str(self.place), os.getcwd()])
        self.drivers.append(
            subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, cwd=self.place, stderr=subprocess.DEVNULL)
        )
        return self.drivers[-1]

    def descendants(self, driver: subprocess.Popen) -> list[psutil.Process]:
        self.seen += (found := psutil.Process(driver.pid).children(recursive=True))
        return found

    def stalled(self) -> list[psutil.Process]:
        self.seen += (
            found := [psutil.Process(int(file.name.rsplit(".", 1)[1])) for file in self.place.glob("go.at.*")]
        )
        return found

    def close(self) -> None:
        for driver in self.drivers:
            driver.kill()
            driver.wait()
        for process in self.seen:
            if process.is_running():
                process.kill()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path)
    yield made
    made.close()


def kill(driver: subprocess.Popen) -> None:
    driver.kill()
    assert driver.wait(WITHIN_S) == -signal.SIGKILL


def test_a_process_that_still_imports_dies_with_its_parent(family):
    driver = family.start("entry", BEGUN=family.begun)
    until(family.begun.exists, WITHIN_S)
    children = family.descendants(driver)
    assert len(children) == 1
    kill(driver)
    assert psutil.wait_procs(children, WITHIN_S)[1] == []


def test_a_process_whose_parent_was_gone_before_its_first_line_imports_nothing(family):
    driver = family.start("entry", BEGUN=family.begun, STALL_UNTIL=family.go)
    until(family.stalled, WITHIN_S)
    children = family.stalled()
    kill(driver)
    family.go.touch()
    assert psutil.wait_procs(children, WITHIN_S)[1] == []
    assert not family.begun.exists()


def test_the_control_without_the_entry_both_live_on(family):
    driver = family.start("bare", BEGUN=family.begun, STALL_UNTIL=family.go)
    until(family.stalled, WITHIN_S)
    kill(driver)
    family.go.touch()
    until(family.begun.exists, WITHIN_S)
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family.stalled())


@pytest.mark.long
def test_ranks_whose_agent_was_killed_while_they_started_never_import_torch(family):
    family.start("torchrun", STALL_UNTIL=family.go, STALL_RANKS=1)
    until(lambda: len(family.stalled()) == 2, WITHIN_S)
    ranks = family.stalled()
    agent = ranks[0].parent()
    assert agent is not None
    assert agent.cmdline()[2:4] == ["ptf.workspace.entry", "torch.distributed.run"]
    agent.kill()
    until(lambda: all(rank.ppid() != agent.pid for rank in ranks), WITHIN_S)
    family.go.touch()
    assert psutil.wait_procs(ranks, WITHIN_S)[1] == []
    assert not (family.place / "go.torch").exists()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{family.place}{os.pathsep}{os.getcwd()}",
        "STALL_UNTIL": str(family.go),
        PARENT: str(os.getpid()),
        PATH: os.pathsep.join(sys.path),
    }

    def with_a_parent(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ptf.workspace.entry", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    # the controls: with a parent it begins and says what is wrong, and a module that needs torch imports it
    rank = with_a_parent("ptf.run", "missing.yaml")
    assert rank.returncode == 2
    assert "missing.yaml" in rank.stderr
    assert with_a_parent("ptf.train.loop").returncode == 0
    assert (family.place / "go.torch").exists()


def test_processes_that_tokenize_die_with_who_started_them(family):
    started = multiprocessing.get_context("fork").Process(
        target=lambda: list(tokenized._in_processes(Sleeping(), iter([(None, "", 0)] * 2), 2))
    )
    started.start()
    driver = psutil.Process(started.pid)
    try:
        until(lambda: len(driver.children()) == 2, WITHIN_S)
        family.seen += driver.children()
    finally:
        started.kill()
        started.join()
    assert psutil.wait_procs(family.seen, WITHIN_S)[1] == []


class Sleeping:
    """Work on a piece that does not end."""

    unread = SimpleNamespace(say=None)

    def __call__(self, *piece: object) -> None:
        time.sleep(600)
