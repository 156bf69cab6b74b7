"""Killing runs (SIGKILL), continuing them, and whether they then end as one that never stopped,
with nothing left behind.

`Trials` kills forked attempts at traps; `Command` kills what a user starts from the command line,
which must end with the same bits. `WallTrials` are of runs that no other run repeats but their replay.
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
from collections import defaultdict
from collections.abc import Callable, Container
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from ptf import api
from ptf.compute.tracking import read_metrics
from ptf.rl.flight_ledger import LEDGER_FILE
from ptf.training_run import DATA
from tests.reliability import exactly_once
from tests.reliability.attempts import DEADLINE_S, RUN_NAME, attempt, note_of, nothing, places, warm
from tests.reliability.ends import differences, names, result, tensors
from tests.reliability.jobs import JOBS, ON_POLICY, ONE_REPLICA, STEPS, job
from tests.reliability.planted_faults import FAULTS
from tests.reliability.remains import adopt_orphans, half_made, in_shared_memory, living, untidy, used_by_others
from tests.reliability.traps import Trap, count_files, count_phases

__all__ = ["Command", "Trials", "adopt_orphans", "attempt", "job", "tensors", "trials_of"]
KINDS = {"phase": 7, "file": 5, "bytes": 2, "time": 6}  # how often each is drawn
# on Ray, whose own processes would inherit a limit of sizes
RAY_KINDS = {"phase": 9, "file": 2, "time": 4, "worker": 5}
RAY_LOGS = "ray-logs"  # in the run's directory
CONTROLLER = "controller.pt"  # in a checkpoint
GANGS = ("policy", "rollout 0", "rollout 1")  # of a run with two replicas


class Trials:
    """Over one recipe's job. The run that never stops is made first: by a process that imports all anew (`warmed`), by
    one that is forked afterwards, whose answers are in the ledger, and by one whose phases and file operations are
    counted. The three must be the same, and of a job with two replicas on Ray also one that has a single replica in
    its own process. Most of its steps have to move the weights."""

    def __init__(self, recipe: str, directory: Path, warmed: bool = True, fault: Callable[[], None] = nothing) -> None:
        self.recipe, self.directory, self.raw, self.fault = recipe, directory, JOBS[recipe](directory), fault
        self.steps = STEPS if recipe in ON_POLICY else 0  # that the ledger of answers has
        self.kinds, self.temporary = KINDS, None
        if on_ray := recipe in ONE_REPLICA:
            self.kinds, self.temporary = RAY_KINDS, directory.parent / "t"  # a short name, for Ray's sockets
            self.temporary.mkdir(exist_ok=True)
        out = {"output": str(directory / "warm" / "out")}
        warmed = warmed and not (on_ray and "ptf.rl.ray_cluster" in sys.modules)  # Ray takes half a minute to start
        alone = warm(self.raw | out, self.log("warm"), self.temporary) if warmed else None
        began, before = time.perf_counter(), self.ledger(self.log("whole"), 0)
        self.whole = self.counting("whole", before) if on_ray else self.made("whole", before)
        self.seconds = time.perf_counter() - began
        assert alone is None or self.repeats(alone) == []
        # of a run with two replicas, what a run with one has otherwise
        self.otherwise = self.repeats(self.made("one", nothing, raw=ONE_REPLICA[recipe](directory))) if on_ray else []
        steps = read_metrics(directory / "whole" / "out" / RUN_NAME / "metrics.jsonl")
        moved = sum(row["grad_norm"] > 0 for row in steps)
        assert 2 * moved > len(steps), f"only {moved} of the {len(steps)} steps of this job move a weight"
        self.age = ages_of(directory / "whole" / "out" / RUN_NAME)
        self.names = names(directory / "whole" / "out")
        self.answers = exactly_once.read(self.log("whole").with_suffix(".answers"))
        self.sizes = sorted(
            {file.stat().st_size for file in (directory / "whole" / "out").rglob("*") if file.is_file()} - {0}
        )

    def log(self, name: str) -> Path:
        (self.directory / name).mkdir(exist_ok=True)
        return self.directory / name / "log"

    def made(
        self,
        name: str,
        before: Callable[[], object],
        after: Callable[[], object] = nothing,
        raw: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A run from its beginning to its end."""
        log = self.log(name)
        raw = (raw or self.raw) | {"output": str(log.parent / "out")}
        assert attempt(raw, RUN_NAME, None, log, before, after, self.temporary) == 0, log.read_text()[-3000:]
        return result(log.parent / "out" / RUN_NAME)

    def repeats(self, found: dict[str, Any]) -> list[str]:
        """What of a run that never stopped is not as in the first one."""
        return differences(found, self.whole)

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """Kind → phase (of file operations, none) → visits."""
        note = self.log("whole").with_suffix(".counts")
        if not note.exists():
            assert self.repeats(self.counting("counted", nothing)) == []
            note = self.log("counted").with_suffix(".counts")
        return json.loads(note.read_text())

    def counting(self, name: str, before: Callable[[], None]) -> dict[str, Any]:
        """A run from its beginning to its end, whose phases and file operations are counted."""
        log, found = self.log(name), {"phase": dict[str, int](), "file": {"": 0}}

        def look() -> None:
            before()
            count_phases(lambda n, phase: found["phase"].__setitem__(phase, n))
            count_files(str(log.parent / "out"), lambda n, _: found["file"].__setitem__("", n))

        return self.made(name, look, lambda: log.with_suffix(".counts").write_text(json.dumps(found)))

    def ledger(self, log: Path, attempt: int) -> Callable[[], None]:
        return (lambda: exactly_once.keep(log.with_suffix(".answers"), attempt)) if self.steps else nothing

    def drawn(self, rng: Random, part: float = 1.0, hit: Container[str] = ()) -> Trap:
        """A kind by its share; phases alike, however often they are visited, but those of `hit` only where all are;
        sizes between those of files that a run writes. Of the first `part` of a whole run's visits, operations and
        time."""
        kind = rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        if kind == "time":
            return Trap(kind, round(rng.uniform(0, part * self.seconds), 4))
        if kind == "worker":  # after its start, which comes after Ray's
            return Trap(kind, round(rng.uniform(0, part * self.seconds / 6), 4), rng.choice(GANGS))
        if kind == "bytes":
            file = rng.randrange(len(self.sizes))
            return Trap(kind, rng.randrange(self.sizes[file - 1] if file else 0, self.sizes[file]))
        phases = sorted(self.counts[kind])
        phase = rng.choice([phase for phase in phases if phase not in hit] or phases)
        return Trap(kind, rng.randint(1, math.ceil(part * self.counts[kind][phase])), phase)

    def trial(self, name: str, traps: list[Trap]) -> dict[str, Any]:
        """A run that is killed at each trap that it reaches, one an attempt, and then goes on to its end."""
        log = self.log(name)
        raw, shared, kills, status = self.raw | {"output": str(log.parent / "out")}, in_shared_memory(), [], 1
        for trap in [*traps, None]:
            note_of(log).unlink(missing_ok=True)
            before = self.prepared(log, len(kills))
            status = attempt(raw, RUN_NAME, trap, log, before, temporary=self.temporary)
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
        killed = signal.SIGKILL if trap.kind == "worker" and where else -status
        return {
            "kind": trap.kind,
            "point": str(trap),
            "reached": killed > 0,
            **({"signal": int(killed), **done} if killed > 0 else {}),
        }

    def judged(self, log: Path, status: int, shared: set[str], also: frozenset[str] = frozenset()) -> dict[str, Any]:
        """`outcome`: same, or what was not; `also` names the files that this trial writes beside those of a forked
        run. A trial that went well is removed."""
        found: dict[str, Any] = {}
        expected = self.names | also
        if self.temporary:  # what a Ray whose trainer was killed said is kept
            said = f"{RUN_NAME}/{RAY_LOGS}"
            expected |= {name for name in names(log.parent / "out") if name == said or name.startswith(f"{said}/")}
        if status:
            outcome = [f"the run that continued ended with {status}: {log.read_text()[-500:]}"]
        else:
            outcome = [f"{name} differs" for name in self.differing(log)]
            outcome += [f"left: {name}" for name in sorted(names(log.parent / "out") - expected)]
            outcome += [f"missing: {name}" for name in sorted(expected - names(log.parent / "out"))]
        kept = places(log, self.temporary)
        left = [*living(), *untidy(Path(kept["TMPDIR"])), *half_made(Path(kept["PTF_CACHE"]))]
        left += [f"/dev/shm/{name}" for name in sorted(in_shared_memory() - shared) if not used_by_others(name)]
        outcome += [f"left: {what}" for what in left]
        if self.steps and not status and log.with_suffix(".answers").exists():
            answers = exactly_once.read(log.with_suffix(".answers"))
            if not any(REPLAY in one for one in outcome):  # one that failed has not the answers of all steps
                found["answers"] = exactly_once.audit(answers, self.expected_answers(log), self.steps)
                outcome += exactly_once.wrong(found["answers"])
        if self.age and not status:
            found["age"] = ages_of(log.parent / "out" / RUN_NAME)
            outcome += [f"age {found['age']}"] * (found["age"] > self.raw["rollout"]["max_staleness"])
        if not outcome:
            shutil.rmtree(log.parent)
        return found | {"outcome": "; ".join(outcome) or "same"}

    def differing(self, log: Path) -> list[str]:
        """What a trial's run has otherwise than the run that never stopped."""
        return differences(result(log.parent / "out" / RUN_NAME), self.whole)

    def expected_answers(self, log: Path) -> list[dict[str, Any]]:
        """The ledger of a run with the same answers that was never killed."""
        return self.answers


REPLAY = "(its replay)"


class WallTrials(Trials):
    """Of a run by the wall clock, which decides otherwise each time: the run that never stops is its replay, which has
    to have its bits. What was decided before a kill has to stay."""

    def __init__(self, recipe: str, directory: Path, warmed: bool = True, fault: Callable[[], None] = nothing) -> None:
        self.decided = defaultdict[Path, list[bytes]](list)  # log → the lines of the ledger after each kill
        super().__init__(recipe, directory, warmed, fault)

    def repeats(self, found: dict[str, Any]) -> list[str]:
        """Nothing is expected to be the same."""
        return []

    def died(self, trap: Trap, status: int, log: Path) -> dict[str, Any]:
        """See Trials; the lines of the ledger are kept."""
        ledger = log.parent / "out" / RUN_NAME / LEDGER_FILE
        text = ledger.read_bytes() if ledger.exists() else b""
        self.decided[log].append(text[: text.rfind(b"\n") + 1])
        found = super().died(trap, status, log)
        return found | ({"decided": text.count(b"\n")} if found["reached"] else {})

    def differing(self, log: Path) -> list[str]:
        """See Trials."""
        run, replayed = log.parent / "out" / RUN_NAME, log.with_name("replayed")
        ledger = (run / LEDGER_FILE).read_bytes()
        wrong = ["what was decided before a kill"] * (not all(ledger.startswith(lines) for lines in self.decided[log]))
        before = self.ledger(replayed, 0)

        def work() -> None:
            assert api.replay(run), "ptf replay found other bits"

        status = attempt(self.raw, RUN_NAME, None, replayed, before, temporary=self.temporary, work=work)
        there = run.with_name(f"{RUN_NAME}-replay")
        if status:
            return [*wrong, f"{replayed.read_text()[-500:]} {REPLAY}"]
        found, whole = result(there), result(run)
        for one in (found, whole):
            del one["model"]["manifest.json"]  # has the run's name; the files that it lists are compared
            del one["checkpoint"][CONTROLLER]
        wrong += differences(found, whole)
        a, b = (decided_state(max((one / "checkpoints").glob("step_*")) / CONTROLLER) for one in (there, run))
        wrong += [CONTROLLER] * (a != b)
        shutil.rmtree(there)
        return wrong

    def expected_answers(self, log: Path) -> list[dict[str, Any]]:
        """See Trials."""
        return exactly_once.read(log.with_name("replayed").with_suffix(".answers"))


def decided_state(file: Path) -> Any:
    """The state of the controller, without what is no decision of the wall clock yet: whether an episode has
    asked or ended that no slice has taken, which the next one does as soon as it is there."""
    state = torch.load(file, weights_only=False)
    for group in state["in_flight"]["groups"]:
        for i, member in enumerate(group["members"]):
            if not (member["counts"] if "ended" in member else len(member["started"].get("ids", ()))):
                group["members"][i] = {"due": member["due"]}

    def comparable(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: comparable(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [comparable(one) for one in value]
        return (value.dtype, value.shape, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value

    return comparable(state)


def ages_of(run: Path) -> int | None:
    """The largest age of a group that was trained, in steps; None of a run whose groups have none."""
    ages = [row["staleness_max"] for row in read_metrics(run / "metrics.jsonl") if "staleness_max" in row]
    return int(max(ages)) if ages else None


def trials_of(recipe: str, directory: Path, warmed: bool = True) -> Trials:
    """The trials of a recipe's job."""
    return (WallTrials if recipe.endswith(", wall") else Trials)(recipe, directory, warmed)


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
                command,
                env={**os.environ, **places(log, self.trials.temporary)},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def main() -> None:
    """`python -m tests.reliability.kills DIRECTORY TRIALS`, in JSON: a list of [recipe, traps, fault or null], whose
    outcome is a JSON line each. A run that never stops is made once a recipe, and has no faults."""
    adopt_orphans()
    directory, made = Path(sys.argv[1]), dict[str, Trials]()
    for n, (recipe, traps, fault) in enumerate(json.loads(sys.argv[2])):
        if recipe not in made:
            (directory / recipe).mkdir()
            made[recipe] = trials_of(recipe, directory / recipe, warmed=False)
        made[recipe].fault = FAULTS[fault] if fault else nothing
        print(json.dumps(made[recipe].trial(f"trial-{n}", [Trap(*trap) for trap in traps])), flush=True)


if __name__ == "__main__":
    main()
