"""Faults in rewards, environments and engines, at random moments of tiny GRPO and PPO runs: whether one becomes a
number, and how soon it is named. Keeps every trial in results/faults.jsonl (a seed that stands there is not tried
again) and writes results/faults.md; exits 1 where one goes wrong.

    python benchmarks/faults.py [--trials 300] [--first 0] [--ray 4] [--minutes 8] [--anew]

A trial is one run of four steps of 16 answers and one fault (tests/reliability/faults.py): in a reward's or an
environment's process, or in what an engine in this process answers. `--ray`: runs on Ray, in each of which an engine's
process has five faults, one a step (tests/reliability/engine_faults.py). After `--minutes` no further one is begun; the
next call goes on from there. `--anew` tries other seeds, for the night, and keeps nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# of the processes
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import results_page  # noqa: E402
from benchmarks.pages import Row, here, keep, kept, table, told, write_page  # noqa: E402
from tests.leftovers import Session  # noqa: E402
from tests.reliability import engine_faults  # noqa: E402
from tests.reliability.faults import DEADLINE_S, NAMED_S, Trials, drawn  # noqa: E402

RESULTS = results_page("faults.md")
KEPT = RESULTS.with_suffix(".jsonl")
BATCH = 20  # trials after which it is looked for what they left


def local(seeds: Sequence[int], place: Path) -> Iterator[Row]:
    trials = Trials(place)
    for seed in seeds:
        yield {"seed": seed, **trials.play(drawn(seed), f"trial-{seed}")}


def on_ray(seeds: Sequence[int], place: Path) -> Iterator[Row]:
    """A process for each run."""
    for seed in seeds:
        (directory := place / f"ray-{seed}").mkdir()
        command = [sys.executable, "-m", "tests.reliability.engine_faults", str(directory), str(seed)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(rows) != len(engine_faults.FAULTS):
            words = f"ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
            rows = [{"fault": "any", "named_s": None, "wrong": [words]}]
        for row in rows:
            yield {"seed": seed, "recipe": "grpo", "place": "engine on Ray", **row}


ABOUT = """\
# Faults in rewards, environments and engines

Command: `python benchmarks/faults.py` (`make faults`)  
Hardware: {hardware}, other work on it  
Date: {date}; commits {commit}

{rows} faults in tiny GRPO and PPO runs. **{numbers} became a reward; {wrong} went wrong in any way; {left} things were
left behind** (processes, shared memory, temporary files). Each was named within {late:.1f} s where rewards and
environments have {deadline:g} s to answer (the bar is {bar:g} s). **An engine's process on Ray that hangs is named
later**: its deadline (compute.timeout_s) is {engine:g} s here, which its start needs on a machine with other work, and
it then has 10 s to say more itself.

A trial is a run of four steps with four answers to each of four prompts, in which one thing goes wrong, at a random
question. It either passes (the same question asked again is answered), or lasts. All answers are compared with those of
a run in which nothing goes wrong: a fault that passes leaves the same bits (answers, rewards, weights); of one that
lasts the answer has no result, and every other one of that step has the reward that it has there; an engine that
answers garbage in the run's own process ends the run, and no later step is made. On Ray the engine is replaced, and the
run ends with the same answers, rewards and weights.

"""


def write() -> int:
    """The page, of all that is kept; the exit status."""
    rows = kept(KEPT)
    cases = defaultdict(list)
    for row in rows:
        cases[row["place"], row["fault"]].append(row)
    wrong = [row for row in rows if row["wrong"] or row.get("left")]
    lines = []
    for (place, fault), of in sorted(cases.items()):
        named = [row["named_s"] for row in of if row["named_s"] is not None]
        ends = "; ".join(
            sorted({"stopped" if row.get("status") else row.get("outcome", "the engine was replaced") for row in of})
        )
        slowest = f"{max(named):.2f}" if named else "-"
        lines.append([place, fault, len(of), ends, slowest, sum(bool(row["wrong"]) for row in of)])
    late = [row["named_s"] for row in rows if row["named_s"] is not None and row["place"] != "engine on Ray"]
    left = sum(len(row.get("left", ())) for row in rows)
    numbers = sum("reward" in reason and "in place of" in reason for row in rows for reason in row["wrong"])
    about = ABOUT.format(
        **{key: told(rows, key) for key in ("hardware", "date", "commit")},
        rows=len(rows),
        numbers=numbers,
        wrong=len(wrong),
        left=left,
        late=max(late, default=0),
        deadline=DEADLINE_S,
        bar=NAMED_S,
        engine=engine_faults.DEADLINE_S,
    )
    made = table("where | fault | trials | what came of it | slowest to be named, s | wrong", lines)
    shown = [f"\n* wrong: {json.dumps(row)[:400]}" for row in wrong]
    return write_page(RESULTS, about, [made, *shown], [f"{row['place']}: {row['fault']}" for row in wrong])


def main() -> int:
    asked = options(
        __doc__,
        trials=300,
        first=(0, "seed, so that several may run side by side"),
        ray=(4, "runs on Ray, five faults each"),
        minutes=60.0,
        anew=(False, "fresh seeds, of which nothing is kept"),
    )
    first, wrong = int(time.time()) if asked.anew else asked.first, 0
    known = {(row["place"] == "engine on Ray", row["seed"]) for row in kept(KEPT)}
    until, about = time.monotonic() + 60 * asked.minutes, here()
    for ray, play, count in ((False, local, asked.trials), (True, on_ray, asked.ray)):
        seeds = [first + i for i in range(count) if (ray, first + i) not in known]
        for batch in (seeds[i : i + (1 if ray else BATCH)] for i in range(0, len(seeds), 1 if ray else BATCH)):
            if time.monotonic() > until:
                break
            session, found = Session(), list[Row]()
            with tempfile.TemporaryDirectory() as place:
                for row in play(batch, Path(place)):
                    found.append({**row, **about})
                    print(json.dumps(found[-1]), flush=True)
            found[-1]["left"] = session.found()  # of all of them
            wrong += sum(bool(row["wrong"] or row.get("left")) for row in found)
            if not asked.anew:
                keep(KEPT, *found)
    return min(1, wrong if asked.anew else write())


if __name__ == "__main__":
    sys.exit(main())
