"""One writer per run: who holds the lease, who may succeed him,
and what is written by whoever has lost it (nothing)."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf import storage
from ptf.compute import lease as leases
from ptf.compute import saver
from ptf.compute.lease import FILE, Lease, LeaseLost, Process, Record, RunInUse, hold_lease
from ptf.compute.tracking import Tracker
from ptf.config import Job, loads
from ptf.errors import UserError
from ptf.run import run
from tests.data.test_s3 import Server, server  # noqa: F401
from tests.tiny import arithmetic, job_file
from tests.train.test_loop import facts, same, train, weights


@pytest.fixture(params=["disk", "s3"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """One whose checkpoints lie on disk, or in an object store."""
    raw = arithmetic(tmp_path)
    if request.param == "s3":
        raw["checkpoint"]["to"] = f"s3://{request.getfixturevalue('server').bucket}/checkpoints"
    return loads(yaml.safe_dump(raw))


def place(job: Job, run: Path) -> str:
    """The lease that others on another machine would meet."""
    return f"{job.checkpoint.to}/{run.name}/{FILE}" if job.checkpoint.to else f"{run}/{FILE}"


def elsewhere(job: Job, tmp_path: Path) -> Path:
    """The run's directory as another machine sees it: the same on a shared disk,
    one of its own where checkpoints lie in an object store."""
    return tmp_path / ("elsewhere" if job.checkpoint.to else "runs") / "a"


def test_a_second_one_is_told_who_holds_it_and_a_released_lease_is_free(job: Job, tmp_path: Path) -> None:
    with hold_lease(job, tmp_path / "runs" / "a") as lease:
        lease.check()
        with pytest.raises(
            RunInUse,
            match=rf"a is being written by process {os.getpid()} on .*, since \d{{4}}-.*kill {os.getpid()}.*remove "
            r".*lease\.json",
        ):
            hold_lease(job, elsewhere(job, tmp_path)).__enter__()
        lease.check()  # being asked for does not change it
        first = lease.tokens[place(job, tmp_path / "runs" / "a")]
    with hold_lease(job, elsewhere(job, tmp_path)) as lease:
        assert lease.tokens[place(job, tmp_path / "runs" / "a")] == first + 1, "each holder has a higher token"


HOLDS = """
import sys, yaml
from pathlib import Path
from ptf.compute.lease import hold_lease
from ptf.config import load
with hold_lease(load(sys.argv[1]), Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(job: Job, tmp_path: Path) -> Iterator[subprocess.Popen]:
    file = job_file(job.model_dump(mode="json"), tmp_path)
    command = [sys.executable, "-c", HOLDS, file, str(tmp_path / "runs" / "a")]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "held\n"
    yield found
    found.kill()
    found.wait()


def test_who_was_killed_is_succeeded_at_once(
    job: Job, tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(RunInUse, match=f"process {holder.pid} on"):
        hold_lease(job, elsewhere(job, tmp_path)).__enter__()
    holder.kill()
    while (Path("/proc") / str(holder.pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
        pass  # nobody has waited for it yet: what is left of it holds nothing
    with hold_lease(job, elsewhere(job, tmp_path)) as lease:
        lease.check()


def stored(file: str) -> Record:
    record = Record.read(file)[1]
    assert record is not None
    return record


def foreign(job: Job, run: Path, change: Callable[[Record], Record]) -> Record:
    """The lease, held by another."""
    with hold_lease(job, run):
        pass
    file = place(job, run)
    found = change(replace(stored(file), released=False))
    storage.write_text(file, found.text)
    return found


def test_a_pid_that_was_given_to_another_process_is_gone(job: Job, tmp_path: Path) -> None:
    foreign(
        job,
        tmp_path / "runs" / "a",
        lambda record: replace(record, holder=replace(record.holder, started=record.holder.started - 1)),
    )
    with hold_lease(job, elsewhere(job, tmp_path)) as lease:
        lease.check()


@pytest.mark.parametrize("other", [{"boot": "another machine"}, {"namespace": "pid:[1]"}], ids=["machine", "container"])
def test_who_is_elsewhere_is_succeeded_after_silence_alone(
    job: Job, tmp_path: Path, other: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though there is no such process here."""
    monkeypatch.setattr(leases, "SILENT_S", 0.5)
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    run = tmp_path / "runs" / "a"

    def gone(record):
        return replace(record, holder=replace(record.holder, pid=2**22 + 1, **other))

    record = foreign(job, run, gone)
    beats = threading.Timer(
        0.2, lambda: storage.write_text(place(job, run), replace(record, beat=record.beat + 1).text)
    )
    beats.start()
    with pytest.raises(RunInUse, match=f"process {2**22 + 1} on"):
        hold_lease(job, elsewhere(job, tmp_path)).__enter__()
    beats.join()
    with hold_lease(job, elsewhere(job, tmp_path)) as lease:
        lease.check()
    assert "which gave no heartbeat for 0.5 s" in capsys.readouterr().out


def test_who_hangs_here_is_succeeded_and_then_writes_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "a"
    with hold_lease(job, run) as lost:
        file = place(job, run)
        record = stored(file)
        storage.write_text(file, replace(record, beat=record.beat - 2 * leases.SILENT_S).text)
        with hold_lease(job, elsewhere(job, tmp_path)) as lease:
            lease.check()
            for act in (lost.check, partial(lost.renew, file), lost.commit().__enter__):
                with pytest.raises(LeaseLost, match=rf"taken over by process {os.getpid()} on"):
                    act()
        assert stored(file).released
    assert stored(file).token == lost.tokens[file] + 1, "nor has it released what is another's"


def test_a_lease_that_was_removed_is_lost_and_not_made_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "a"
    with hold_lease(job, run) as lease:
        storage.remove(place(job, run))
        for act in (lease.check, partial(lease.renew, place(job, run)), lease.commit().__enter__):
            with pytest.raises(LeaseLost, match="was removed"):
                act()
    assert not storage.exists(place(job, run))


def test_heartbeats_are_given_while_it_is_held(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    run = tmp_path / "runs" / "a"
    with hold_lease(job, run) as lease:
        file = place(job, run)
        first = storage.read_text(file)
        while storage.read_text(file) == first:
            pass
        lease.check()


def test_of_all_that_ask_at_once_one_gets_it(job: Job, tmp_path: Path) -> None:
    """After one that was killed: each sees that it is gone, and one is first."""
    foreign(job, tmp_path / "runs" / "a", lambda record: replace(record, holder=replace(record.holder, pid=2**22 + 1)))
    found: list[Any] = []
    ready, all_done = threading.Barrier(5), threading.Barrier(5)

    def ask() -> None:
        ready.wait()
        try:
            with hold_lease(job, elsewhere(job, tmp_path)) as lease:
                found.append(lease)
                all_done.wait(60)
        except RunInUse as held:
            found.append(held)
            all_done.wait(60)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(one).__name__ for one in found) == ["Lease"] + ["RunInUse"] * 4


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"token": 1}'])
def test_what_is_no_lease_is_named(tmp_path: Path, text: str) -> None:
    job = loads(yaml.safe_dump(arithmetic(tmp_path)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FILE).write_text(text)
    with pytest.raises(UserError, match=r"lease\.json is not a lease: remove it"):
        hold_lease(job, tmp_path / "a").__enter__()


def test_another_process_of_the_run_is_told_of_it(job: Job, tmp_path: Path) -> None:
    with hold_lease(job, tmp_path / "runs" / "a") as lease:
        told = Lease(**json.loads(json.dumps(vars(lease))))
        assert told == lease
        told.check()
    with pytest.raises(LeaseLost):
        told.check()
    assert Process.this().id != Process.this().id


def held(directory: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file() and "tensors" not in path.parts
    }


@pytest.mark.long
@pytest.mark.parametrize("remote", [False, True], ids=["disk", "memory"])
def test_a_run_that_was_taken_over_ends_without_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """And whoever took it over ends with the bits of the uninterrupted run."""
    raw = arithmetic(tmp_path)
    if remote:
        raw["checkpoint"]["to"] = "memory://taken"
    whole = train(raw, "whole")
    log, seen = Tracker.log, {}
    job, directory, other = loads(yaml.safe_dump(raw)), Path(raw["output"]) / "a", ExitStack()

    def stalled(self: Tracker, step: int, metrics: Any) -> None:
        if step == 7:
            for thread in threading.enumerate():
                if thread.name == "ptf-save":  # the checkpoint of step 5 was begun under the lease
                    thread.join(60)
            for file in [str(directory / FILE), *(["memory://taken/a/lease.json"] if remote else [])]:
                record = stored(file)
                storage.write_text(file, replace(record, beat=record.beat - 100).text)
            other.enter_context(hold_lease(job, directory))
            seen.update(held(directory))
        log(self, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", stalled)
        with pytest.raises(LeaseLost, match="taken over by process"):
            train(raw, "a")
    assert held(directory) == seen
    other.close()
    train(raw, "a")
    assert facts(directory) == facts(whole)
    assert same(weights(directory), weights(whole))


def test_a_checkpoint_is_not_committed_by_who_has_lost_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, write = arithmetic(tmp_path), saver.write

    def slow(directory: str, *args: Any) -> Any:
        found = write(directory, *args)
        if directory.endswith("step_00000010"):
            (Path(raw["output"]) / "a" / FILE).unlink()
        return found

    monkeypatch.setattr(saver, "write", slow)
    with pytest.raises(LeaseLost, match="was removed"):
        train(raw, "a")
    assert not (Path(raw["output"]) / "a" / "checkpoints" / "step_00000010" / "manifest.json").exists()


def test_a_second_run_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    job = loads(yaml.safe_dump(raw))
    directory, handler = Path(raw["output"]) / "a", signal.getsignal(signal.SIGTERM)  # Ray leaves one of its own
    with hold_lease(job, directory):
        (directory / "stop").touch()
        with pytest.raises(RunInUse):
            run(job, "a")
        assert sorted(path.name for path in directory.iterdir()) == [".lease.json.lock", "lease.json", "stop"]
    assert json.loads((directory / FILE).read_text())["released"]
    assert signal.getsignal(signal.SIGTERM) == handler
