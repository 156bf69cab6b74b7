"""Does a long run grow? 10,000 SFT steps and 3,000 GRPO steps of tiny models, and the memory (PSS) of all processes of
the run beside the number of its step. Keeps each measurement in results/soak.jsonl and writes results/soak.md from the
newest of each run; exits 1 where a bar is missed.

    python benchmarks/soak.py [--only sft grpo] [--seed 1] [--steps 200]

Each run is a process of its own, which first makes a short run of the same job (so that whatever is made once exists),
counts its open files, threads and children, makes the long run, and counts again. This process looks at the memory of
that one and of all its descendants once a second, and afterwards for processes, shared memory and temporary files that
are left (tests/leftovers.py).
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
import yaml
from commands import ROOT, options
from flow_runs import results_page
from pages import Row, here, keep, kept, table, write_page

from ptf.config import loads
from ptf.run import run
from tests.leftovers import Session
from tests.tiny import arithmetic, online

RESULTS = results_page("soak.md")
KEPT = RESULTS.with_suffix(".jsonl")
STEPS = {"sft": 10_000, "grpo": 3_000}
MOST_MIB = {"sft": 1.0, "grpo": 2.0}  # in 1,000 steps, at the upper end of the slope's 95 % interval
FIRST, BLOCK = 500, 100  # steps that do not count, and that make one point of the line
LOOK_S = 1.0


def job(kind: str, directory: Path, steps: int, seed: int) -> dict[str, Any]:
    """A checkpoint and held-out measurements every 50 steps, and everything that is written by default."""
    raw = arithmetic(directory) | {"seed": seed, "track": {"print_every": 500}}
    if kind == "grpo":
        raw = online(raw, directory, "tests.rl.plugs:varied", prompts_per_step=8)
        raw["algo"] = {"num_minibatches": 2, "kl_coef": 0.01}
        raw["evaluate"] = {"sources": {"dev": raw["data"]["sources"]["p"]}, "limit": 20}
    raw["train"] |= {"steps": steps, "validate_every": 50, "schedule": "constant", "lr": 1e-4}
    return raw | {"checkpoint": {"every": 50, "keep": 2}}


def own() -> dict[str, int]:
    """What this process has open."""
    gc.collect()
    me = psutil.Process()
    return {"files": me.num_fds(), "threads": me.num_threads(), "processes": len(me.children(recursive=True))}


def measured(kind: str, directory: Path, steps: int, seed: int) -> None:
    """In the run's process: a short run, then the long one; prints what is open more than before."""
    with contextlib.redirect_stdout(sys.stderr):
        run(loads(yaml.safe_dump(job(kind, directory, 100, seed))), "short")
        before = own()
        run(loads(yaml.safe_dump(job(kind, directory, steps, seed))), "long")
        after = own()
    print(json.dumps({name: after[name] - before[name] for name in before}))


def memory_mib(process: psutil.Process) -> dict[int, float]:
    """PSS of it and of all that descend from it, without those that end meanwhile. Pages of files count whole in each
    process: of libraries PSS counts a share, which changes with whatever else runs on the machine."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(OSError):
                shares = dict(
                    row.split()[:2] for row in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()[1:]
                )
                whole = dict(
                    row.split()[:2]
                    for row in Path(f"/proc/{one.pid}/status").read_text().splitlines()
                    if row.startswith("RssFile")
                )
                found[one.pid] = (int(shares["Pss_Anon:"]) + int(shares["Pss_Shmem:"]) + int(whole["RssFile:"])) / 1024
    return found


def last_step(metrics: Path) -> int:
    """Of the rows that are written whole."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 16_384))
        rows = file.read().split(b"\n")[:-1]
    with contextlib.suppress(ValueError, IndexError):
        return json.loads(rows[-1])["step"]
    return 0


def slope(points: Sequence[Sequence[float]]) -> dict[str, float]:
    """MiB in 1,000 steps with its 95 % interval: a line through the means of blocks of steps. What one block has above
    the line the next often has too; the interval is wider by that (as for an autoregression of first order)."""
    from scipy.stats import t

    steps, mib = np.array(points).T
    blocks = [steps // BLOCK == block for block in np.unique(steps // BLOCK)]
    x, y = np.array([steps[of].mean() for of in blocks]), np.array([mib[of].mean() for of in blocks])
    rate, start = np.polyfit(x, y, 1)
    left = y - (rate * x + start)
    rho = min(0.95, max(0.0, float(left[1:] @ left[:-1] / (left @ left))))
    error = np.sqrt(left @ left / (len(x) - 2) / ((x - x.mean()) ** 2).sum() * (1 + rho) / (1 - rho))
    half = float(t.ppf(0.975, len(x) - 2) * error)
    return {
        "mib_per_1000": rate * 1000,
        "low": (rate - half) * 1000,
        "high": (rate + half) * 1000,
        "correlation": rho,
        "points": len(x),
    }


def soaked(kind: str, steps: int, seed: int) -> Row:
    """One run, and what it left."""
    session, points, most, of = Session(), list[tuple[int, float]](), 0, here()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=session.place.parent) as place:
        command = [sys.executable, __file__, "--run", kind, place, str(steps), str(seed)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with (
            (Path(place) / "log").open("w") as log,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as made,
        ):
            watched, metrics = psutil.Process(made.pid), Path(place) / "runs" / "long" / "metrics.jsonl"
            while made.poll() is None:
                step, found = last_step(metrics), memory_mib(watched)
                if FIRST < step < steps:
                    points.append((step, sum(found.values())))
                    most = max(most, len(found))
                time.sleep(LOOK_S)
            assert made.stdout is not None
            said = made.stdout.read()
        if made.returncode:
            sys.exit(f"{kind}: ended with {made.returncode}\n{(Path(place) / 'log').read_text()[-3000:]}")
        made_at, unfinished = Path(place) / "runs" / "long", [".metadata", ".lease.json.lock"]
        hidden = [path for path in made_at.rglob("*") if path.name.startswith(".") and path.name not in unfinished]
        files = [str(path.relative_to(made_at)) for path in [*hidden, *made_at.rglob("*.tmp")]]
        checkpoints = len(list((made_at / "checkpoints").glob("step_*")))
    return {
        "run": kind,
        "seed": seed,
        "steps": steps,
        **slope(points),
        "first_mib": points[0][1],
        "last_mib": points[-1][1],
        "samples": len(points),
        "processes_of_run": most,
        "open_more": json.loads(said.splitlines()[-1]),
        "left": [*session.found(), *files],
        "checkpoints": checkpoints,
        "seconds": round(time.perf_counter() - began),
        **of,
        "curve": [[int(s), round(m, 2)] for s, m in points[:: max(1, len(points) // 60)]],
    }


def missed(row: Row) -> list[str]:
    """The bars that it does not meet."""
    faults = {
        f"grows by up to {row['high']:.2f} MiB": not row["high"] < MOST_MIB[row["run"]],
        f"open more than before: {row['open_more']}": any(number > 0 for number in row["open_more"].values()),
        f"left: {'; '.join(row['left'])}": row["left"],
        "checkpoints were not removed": row["checkpoints"] > 2,
    }
    return [fault for fault, there in faults.items() if there]


ABOUT = """\
# Long runs

Command: `python benchmarks/soak.py` (`make soak`); one run alone with `--only`  
Hardware, date and commit: in each row; one thread, no GPU

Tiny models (2 layers of 64) through `ptf.run.run`, with all that is written by default (TensorBoard too), a checkpoint
and held-out measurements every 50 steps, two checkpoints kept. GRPO: our own decoder as the engine, 8 prompts with 4
answers each, two updates a step, a reference model, the reward in a process of its own. Memory is the PSS of all
processes of the run, once a second; pages of mapped files count whole in each, since the share that PSS counts changes
with whatever else runs on the machine. The slope is of a line through means of {block} steps, the first {first} left
out, with its 95 % interval (widened by the correlation of neighbours).
Open more: files, threads and child processes that the run's process has after the long run and had not after a short
one before. Left: processes, shared memory, temporary and unfinished files after its end.

"""
NAMES = (
    "run | steps | processes | MiB, from step 500 to the end | MiB in 1,000 steps (95 %) | bar | open more | left | "
    "seconds | measured"
)


def write() -> int:
    """The page, of the newest row of each run. How many bars are missed; a run that was not made misses its own."""
    newest = {row["run"]: row for row in kept(KEPT)}
    rows, notes, absent = [], [], [f"{kind}: not made" for kind in STEPS if kind not in newest]
    for kind, row in newest.items():
        notes += [f"{kind}: {fault}" for fault in missed(row)]
        more = row["open_more"]
        rows.append(
            [
                kind,
                f"{row['steps']:,}",
                row["processes_of_run"],
                f"{row['first_mib']:.1f} → {row['last_mib']:.1f}",
                f"{row['mib_per_1000']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})",
                f"< {MOST_MIB[kind]:g}",
                " / ".join(f"{more[of]:+d}" for of in ("files", "threads", "processes")),
                len(row["left"]),
                f"{row['seconds']:,}",
                f"{row['date']}, {row['commit']}, {row['hardware']}",
            ]
        )
    about = ABOUT.format(block=BLOCK, first=FIRST) + "".join(f"* **{note}**\n" for note in notes)
    return write_page(RESULTS, about + "\n" * bool(notes), [table(NAMES, rows)], [*notes, *absent])


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        kind, place, steps, seed = sys.argv[2:]
        measured(kind, Path(place), int(steps), int(seed))
        return 0
    asked = options(__doc__, only=STEPS, seed=1, steps=(None, "a shorter look, of which nothing is kept"))
    for kind in asked.only:
        row = soaked(kind, asked.steps or STEPS[kind], asked.seed)
        print(json.dumps(row), flush=True)
        if not asked.steps:
            keep(KEPT, row)
    return 0 if asked.steps else write()


if __name__ == "__main__":
    sys.exit(main())
