"""Killing runs (SIGKILL), continuing them, and whether they then end as one that never stopped, with nothing left behind.

The one idea: an attempt at a run is a process forked from this one, which has imported what a run imports but never trained; what a fork inherits is
code, not state. `Command` does the same through the command line, as a user's run would be killed, and must end with the same bits.
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptf import storage
from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import loads
from ptf.run import run
from tests.reliability import exactly_once
from tests.reliability.faults import FAULTS
from tests.reliability.jobs import JOBS, ON_POLICY, STEPS, job
from tests.reliability.traps import Trap, arm, count_files, count_phases

__all__ = ["Command", "Trap", "Trials", "attempt", "job", "warm"]
DEADLINE_S, GRACE_S = 240.0, float(os.environ.get("SUITE_GRACE_S", "20"))
LINEAGE = "run"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KINDS = {"phase": 7, "file": 5, "bytes": 2, "time": 6}  # how often each is drawn


def adopt_orphans() -> None:
    """Whatever descends from this process and has lost its parent becomes this one's child: a process that is left behind is one that is still there."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def nothing() -> None: ...


def attempt(
    raw: dict[str, Any], lineage: str, trap: Trap | None, log: Path, before: Callable[[], object] = nothing, after: Callable[[], object] = nothing
) -> int:
    """Run it in a process of its own, and how that ended: 0, a status, or minus a signal. `before` is called there first, `after` last. Temporary
    files and what is remembered of verified files lie beside the log."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setpgid(0, 0)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= places(log)
            tempfile.tempdir = None
            before()
            if trap:
                arm(trap, raw["output"], note_of(log))
            run(loads(yaml.safe_dump(raw)), lineage)
            after()
            status = 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(status)
    with contextlib.suppress(OSError):  # it has done so itself, or has ended
        os.setpgid(pid, pid)
    return _ended(pid, trap.at if trap and trap.kind == "time" else None)


def places(log: Path) -> dict[str, str]:
    """Directories of one trial's own, by the variable that names them."""
    found = {"TMPDIR": log.parent / "temporary", "PTF_CACHE": log.parent / "cache"}
    for place in found.values():
        place.mkdir(parents=True, exist_ok=True)
    return {name: str(place) for name, place in found.items()}


def note_of(log: Path) -> Path:
    return log.with_suffix(".died")


def _ended(pid: int, killed_after: float | None = None) -> int:
    began = time.monotonic()
    while (spent := time.monotonic() - began) < DEADLINE_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if killed_after is not None and spent >= killed_after:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01 if killed_after is None else min(0.01, max(0.0, killed_after - spent)))
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"a run did not end within {DEADLINE_S:g} s")


def warm(raw: dict[str, Any], log: Path) -> dict[str, Any]:
    """Import what a run of this job imports, which a run in a process of its own finds. Returns what that run left."""
    note, known = log.with_suffix(".modules"), set(sys.modules)
    after = lambda: note.write_text("\n".join(name for name in sys.modules if name not in known))  # noqa: E731
    assert attempt(raw, LINEAGE, None, log, after=after) == 0, log.read_text()[-3000:]
    for name in note.read_text().splitlines():
        with contextlib.suppress(Exception):  # names that are no modules of files
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collecting does not copy the pages of all that was imported
    return result(Path(raw["output"]) / LINEAGE)


def result(directory: Path) -> dict[str, Any]:
    """What a finished run left, without what a clock made: rows of metrics, rollouts, files of the export, and files of the last checkpoint (weights,
    optimizer, the state of data and controller) by SHA-256."""
    rows = [{k: v for k, v in row.items() if not is_clock(k)} for row in read_metrics(directory / "metrics.jsonl")]
    last = max((directory / "checkpoints").glob("step_*"))
    samples = directory / "samples.jsonl"
    return {
        "metrics": json.dumps(rows), "samples": samples.read_text() if samples.exists() else "", "model": hashed(directory / "model"),
        "checkpoint": {"name": last.name} | hashed(last, without=(storage.MANIFEST, ".metadata")),
        "tensors": {f"{index.parent.relative_to(last)}/{name}": value for index in last.rglob(".metadata") for name, value in tensors(index.parent).items()},
    }  # fmt: skip


def tensors(directory: Path) -> dict[str, bytes]:
    """Of a checkpoint, by name, as its index says where they are: the index itself names its own directory."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in reader.read_metadata().state_dict_metadata.items() if isinstance(what, TensorStorageMetadata)
    }  # fmt: skip
    load(found, storage_reader=reader, no_dist=True)
    return {name: value.numpy().tobytes() for name, value in found.items()}


def hashed(directory: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*")) if file.is_file() and file.name not in without
    }  # fmt: skip


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def in_shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def used_by_others(name: str) -> bool:
    """Whether a living process has it mapped or open."""
    path = f"/dev/shm/{name}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path in (process / "maps").read_text() or any(os.path.realpath(number) == path for number in (process / "fd").iterdir()):
                return True
    return False


def living() -> list[str]:
    """Processes that this one has started or adopted and that do not end within a grace period, which are then killed."""
    ends = time.monotonic() + GRACE_S
    while True:
        try:
            done, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if not done:
            if time.monotonic() > ends:
                break
            time.sleep(0.01)
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            found.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:200]}")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


class Trials:
    """Over one recipe's job. The run that never stops is made first: by a process that imports all anew (`warmed`), by one that is forked afterwards,
    whose answers are in the ledger, and by one whose phases and file operations are counted. The three must be the same."""

    def __init__(self, recipe: str, directory: Path, warmed: bool = True, fault: Callable[[], None] = nothing) -> None:
        self.recipe, self.directory, self.raw, self.fault = recipe, directory, JOBS[recipe](directory), fault
        self.steps = STEPS if recipe in ON_POLICY else 0  # that the ledger of answers has
        alone = warm(self.raw | {"output": str(directory / "warm" / "out")}, self.log("warm")) if warmed else None
        began = time.perf_counter()
        self.whole = self.made("whole", self.ledger(self.log("whole"), 0))
        self.seconds = time.perf_counter() - began
        assert alone is None or differences(self.whole, alone) == []
        self.names = names(directory / "whole" / "out")
        self.answers = exactly_once.read(self.log("whole").with_suffix(".answers"))
        self.sizes = sorted({file.stat().st_size for file in (directory / "whole" / "out").rglob("*") if file.is_file()})

    def log(self, name: str) -> Path:
        (self.directory / name).mkdir(exist_ok=True)
        return self.directory / name / "log"

    def made(self, name: str, before: Callable[[], object], after: Callable[[], object] = nothing) -> dict[str, Any]:
        """A run from its beginning to its end."""
        log = self.log(name)
        assert attempt(self.raw | {"output": str(log.parent / "out")}, LINEAGE, None, log, before, after) == 0, log.read_text()[-3000:]
        return result(log.parent / "out" / LINEAGE)

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """Kind → phase (of file operations, none) → visits."""
        log, found = self.log("counted"), {"phase": dict[str, int](), "file": {"": 0}}
        note = log.with_suffix(".counts")

        def look() -> None:
            count_phases(lambda n, phase: found["phase"].__setitem__(phase, n))
            count_files(str(log.parent / "out"), lambda n, _: found["file"].__setitem__("", n))

        made = self.made("counted", look, lambda: note.write_text(json.dumps(found)))
        assert differences(made, self.whole) == []
        return json.loads(note.read_text())

    def ledger(self, log: Path, attempt: int) -> Callable[[], None]:
        return (lambda: exactly_once.keep(log.with_suffix(".answers"), attempt)) if self.steps else nothing

    def drawn(self, rng: Random, part: float = 1.0) -> Trap:
        """A kind by its share; phases alike, however often they are visited; sizes between those of files that a run writes. Of the first `part` of a
        whole run's visits, operations and time."""
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "time":
            return Trap(kind, round(rng.uniform(0, part * self.seconds), 4))
        if kind == "bytes":
            file = rng.randrange(len(self.sizes))
            return Trap(kind, rng.randrange(self.sizes[file - 1] if file else 0, self.sizes[file]))
        phase = rng.choice(sorted(self.counts[kind]))
        return Trap(kind, rng.randint(1, math.ceil(part * self.counts[kind][phase])), phase)

    def trial(self, name: str, traps: list[Trap]) -> dict[str, Any]:
        """A run that is killed at each trap that it reaches, one an attempt, and then goes on to its end."""
        log = self.log(name)
        raw, shared, kills, status = self.raw | {"output": str(log.parent / "out")}, in_shared_memory(), [], 1
        for trap in [*traps, None]:
            note_of(log).unlink(missing_ok=True)
            status = attempt(raw, LINEAGE, trap, log, self.prepared(log, len(kills)))
            if trap:
                kills.append(self.died(trap, status, log))
            if status >= 0:
                break
        return {"kills": kills, **self.judged(log, status, shared)}

    def prepared(self, log: Path, attempt: int) -> Callable[[], None]:
        """What an attempt of a trial begins with."""

        def begin() -> None:
            self.fault()
            self.ledger(log, attempt)()

        return begin

    def died(self, trap: Trap, status: int, log: Path) -> dict[str, Any]:
        """What is written down of a kill."""
        rows = log.parent / "out" / LINEAGE / "metrics.jsonl"
        where = note_of(log).read_text() if note_of(log).exists() else None
        done = {"where": where} if where else {"rows": rows.read_bytes().count(b"\n") if rows.exists() else 0}
        return {"kind": trap.kind, "point": str(trap), "reached": status < 0, **({"signal": -status, **done} if status < 0 else {})}

    def judged(self, log: Path, status: int, shared: set[str]) -> dict[str, Any]:
        """`outcome`: same, or what was not. A trial that went well is removed."""
        found: dict[str, Any] = {}
        if status:
            outcome = [f"the run that continued ended with {status}: {log.read_text()[-500:]}"]
        else:
            outcome = [f"{name} differs" for name in differences(result(log.parent / "out" / LINEAGE), self.whole)]
            outcome += [f"left: {name}" for name in sorted(names(log.parent / "out") - self.names)]
            outcome += [f"missing: {name}" for name in sorted(self.names - names(log.parent / "out"))]
        outcome += [f"left: {line}" for line in living()]
        outcome += [f"left: {file}" for place in places(log).values() for file in sorted(Path(place).rglob("*")) if untidy(file)]
        outcome += [f"left: /dev/shm/{name}" for name in sorted(in_shared_memory() - shared) if not used_by_others(name)]
        if self.steps and not status and log.with_suffix(".answers").exists():
            found["answers"] = exactly_once.audit(exactly_once.read(log.with_suffix(".answers")), self.answers, self.steps)
            outcome += exactly_once.wrong(found["answers"])
        if not outcome:
            shutil.rmtree(log.parent)
        return found | {"outcome": "; ".join(outcome) or "same"}


def untidy(path: Path) -> bool:
    """Whether what lies in a directory for temporary files, or in the cache, is none of what belongs there."""
    return path.is_file() and ("temporary" in path.parts or "partial" in path.name or path.suffix == ".tmp")


def differences(found: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Names of what is other, down to the file."""
    wrong = []
    for key, value in whole.items():
        if isinstance(value, dict):
            wrong += [f"{key}/{name}" for name in sorted(value.keys() | found[key].keys()) if value.get(name) != found[key].get(name)]
        elif found[key] != value:
            wrong.append(key)
    return wrong


class Command:
    """Trials of the same job by `python -m ptf.cli train`, in a process group of its own."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials

    def trial(self, name: str, rng: Random) -> dict[str, Any]:
        """Killed with its process group a random while after a row of metrics is there, or after its first line, and continued by the same command."""
        log = self.trials.log(name)
        out, shared = log.parent / "out", in_shared_memory()
        config = log.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(self.trials.raw | {"output": str(out)}))
        step = rng.randrange(json.loads(self.trials.whole["metrics"])[-1]["step"])
        delay = round(rng.uniform(0, 1.5 * self.trials.seconds / (step + 2)), 4)
        rows = out / LINEAGE / "metrics.jsonl"
        process = self._started(config, log)
        there = lambda: rows.exists() and rows.read_bytes().count(b"\n") >= step if step else log.read_bytes()  # noqa: E731
        ends = time.monotonic() + DEADLINE_S
        while not there() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait(DEADLINE_S)
        trap = Trap("time", delay, f"after row {step}")
        kills = [self.trials.died(trap, status, log)]
        if status:
            status = self._started(config, log).wait(DEADLINE_S)
        return {"kills": kills, **self.trials.judged(log, status, shared)}

    def _started(self, config: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ptf.cli", "train", str(config), "--lineage", LINEAGE]
        with log.open("a") as out:
            return subprocess.Popen(command, env={**os.environ, **places(log)}, stdout=out, stderr=out, start_new_session=True)


def main() -> None:
    """`python -m tests.reliability.kills DIRECTORY TRIALS`, in JSON: a list of [recipe, traps, fault or null], whose outcome is a JSON line each. A run
    that never stops is made once a recipe, and has no faults."""
    adopt_orphans()
    directory, made = Path(sys.argv[1]), dict[str, Trials]()
    for n, (recipe, traps, fault) in enumerate(json.loads(sys.argv[2])):
        if recipe not in made:
            (directory / recipe).mkdir()
            made[recipe] = Trials(recipe, directory / recipe, warmed=False)
        made[recipe].fault = FAULTS[fault] if fault else nothing
        print(json.dumps(made[recipe].trial(f"trial-{n}", [Trap(*trap) for trap in traps])), flush=True)


if __name__ == "__main__":
    main()
