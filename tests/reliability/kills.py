"""Killing runs (SIGKILL), continuing them, and whether they then end as one that never stopped,
with nothing left behind.

`Trials` kills forked attempts at traps; `Command` kills what a user starts from the command line,
which must end with the same bits.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import yaml

from ptf.training_run import DATA
from tests.reliability import exactly_once
from tests.reliability.attempts import DEADLINE_S, RUN_NAME, attempt, note_of, nothing, places, warm
from tests.reliability.ends import differences, names, result, tensors
from tests.reliability.jobs import JOBS, ON_POLICY, STEPS, job
from tests.reliability.planted_faults import FAULTS
from tests.reliability.remains import adopt_orphans, half_made, in_shared_memory, living, untidy, used_by_others
from tests.reliability.traps import Trap, count_files, count_phases

__all__ = ["Command", "Trials", "adopt_orphans", "attempt", "job", "tensors"]
KINDS = {"phase": 7, "file": 5, "bytes": 2, "time": 6}  # how often each is drawn


class Trials:
    """Over one recipe's job. The run that never stops is made first: by a process that imports all anew (`warmed`), by
    one that is forked afterwards, whose answers are in the ledger, and by one whose phases and file operations are
    counted. The three must be the same."""

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
        self.sizes = sorted(
            {file.stat().st_size for file in (directory / "whole" / "out").rglob("*") if file.is_file()} - {0}
        )

    def log(self, name: str) -> Path:
        (self.directory / name).mkdir(exist_ok=True)
        return self.directory / name / "log"

    def made(self, name: str, before: Callable[[], object], after: Callable[[], object] = nothing) -> dict[str, Any]:
        """A run from its beginning to its end."""
        log = self.log(name)
        assert attempt(self.raw | {"output": str(log.parent / "out")}, RUN_NAME, None, log, before, after) == 0, (
            log.read_text()[-3000:]
        )
        return result(log.parent / "out" / RUN_NAME)

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
        """A kind by its share; phases alike, however often they are visited; sizes between those of files that a run
        writes. Of the first `part` of a whole run's visits, operations and time."""
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
            status = attempt(raw, RUN_NAME, trap, log, self.prepared(log, len(kills)))
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
        rows = log.parent / "out" / RUN_NAME / "metrics.jsonl"
        where = note_of(log).read_text() if note_of(log).exists() else None
        done = {"where": where} if where else {"rows": rows.read_bytes().count(b"\n") if rows.exists() else 0}
        return {
            "kind": trap.kind,
            "point": str(trap),
            "reached": status < 0,
            **({"signal": -status, **done} if status < 0 else {}),
        }

    def judged(self, log: Path, status: int, shared: set[str], also: frozenset[str] = frozenset()) -> dict[str, Any]:
        """`outcome`: same, or what was not; `also` names the files that this trial writes beside those of a forked
        run. A trial that went well is removed."""
        found: dict[str, Any] = {}
        expected = self.names | also
        if status:
            outcome = [f"the run that continued ended with {status}: {log.read_text()[-500:]}"]
        else:
            outcome = [f"{name} differs" for name in differences(result(log.parent / "out" / RUN_NAME), self.whole)]
            outcome += [f"left: {name}" for name in sorted(names(log.parent / "out") - expected)]
            outcome += [f"missing: {name}" for name in sorted(expected - names(log.parent / "out"))]
        kept = places(log)
        left = [*living(), *untidy(Path(kept["TMPDIR"])), *half_made(Path(kept["PTF_CACHE"]))]
        left += [f"/dev/shm/{name}" for name in sorted(in_shared_memory() - shared) if not used_by_others(name)]
        outcome += [f"left: {what}" for what in left]
        if self.steps and not status and log.with_suffix(".answers").exists():
            found["answers"] = exactly_once.audit(
                exactly_once.read(log.with_suffix(".answers")), self.answers, self.steps
            )
            outcome += exactly_once.wrong(found["answers"])
        if not outcome:
            shutil.rmtree(log.parent)
        return found | {"outcome": "; ".join(outcome) or "same"}


class Command:
    """Trials of the same job by `python -m ptf.cli train`, in a process group of its own."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials

    def trial(self, name: str, rng: Random) -> dict[str, Any]:
        """Killed with its process group a random while after a row of metrics is there, or after its first line, and
        continued by the same command."""
        log = self.trials.log(name)
        out, shared = log.parent / "out", in_shared_memory()
        config = log.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(self.trials.raw | {"output": str(out)}))
        step = rng.randrange(json.loads(self.trials.whole["metrics"])[-1]["step"])
        delay = round(rng.uniform(0, 1.5 * self.trials.seconds / (step + 2)), 4)
        rows = out / RUN_NAME / "metrics.jsonl"
        process = self._started(config, log)

        def there():
            return rows.exists() and rows.read_bytes().count(b"\n") >= step if step else log.read_bytes()

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
        also = frozenset({f"{RUN_NAME}/{DATA}"})  # `ptf train` keeps the stamps of the data
        return {"kills": kills, **self.trials.judged(log, status, shared, also)}

    def _started(self, config: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ptf.cli", "train", str(config), "--run-name", RUN_NAME]
        with log.open("a") as out:
            return subprocess.Popen(
                command, env={**os.environ, **places(log)}, stdout=out, stderr=out, start_new_session=True
            )


def main() -> None:
    """`python -m tests.reliability.kills DIRECTORY TRIALS`, in JSON: a list of [recipe, traps, fault or null], whose
    outcome is a JSON line each. A run that never stops is made once a recipe, and has no faults."""
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
