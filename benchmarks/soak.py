"""Does a long run grow? 10,000 SFT steps and 3,000 GRPO steps of tiny models, and the memory (PSS) of all processes of
the run beside the number of its step. Keeps each measurement in results/soak.jsonl and writes results/soak.md from the
newest of each run; exits 1 where a bar is missed.

    python benchmarks/soak.py [--only sft grpo] [--seed 1] [--steps 200]

Each run is a process of its own, which first makes a short run of the same job (so that whatever is made once exists),
counts its open files, threads and children, makes the long run, and counts again. This process looks at the memory of
that one and of all its descendants once a second, and afterwards for processes, shared memory and temporary files that
are left (tests/leftovers.py).
"""

import argparse
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
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.leftovers import Session  # noqa: E402
from tests.tiny import arithmetic  # noqa: E402

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
        prompts = {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}
        raw |= {
            "recipe": "grpo",
            "algo": {"num_minibatches": 2, "kl_coef": 0.01},
            "evaluate": {"sources": {"dev": prompts}, "limit": 20},
        }
        raw["rollout"] = {
            "engine": "native",
            "prompts_per_step": 8,
            "group_size": 4,
            "max_new_tokens": 6,
            "reward": {"use": "tests.rl.plugs:varied"},
        }
        raw["data"] |= {"sources": {"sums": prompts}, "validation": {}}
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


def soaked(kind: str, steps: int, seed: int) -> dict[str, Any]:
    """One run, and what it left."""
    session, points, most, of = Session(), list[tuple[int, float]](), 0, commit()
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
        "commit": of,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": cpu(),
        "curve": [[int(s), round(m, 2)] for s, m in points[:: max(1, len(points) // 60)]],
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The bars that it does not meet."""
    return [
        *([f"grows by up to {row['high']:.2f} MiB"] if not row["high"] < MOST_MIB[row["run"]] else []),
        *(
            [f"open more than before: {row['open_more']}"]
            if any(number > 0 for number in row["open_more"].values())
            else []
        ),
        *([f"left: {'; '.join(row['left'])}"] if row["left"] else []),
        *(["checkpoints were not removed"] if row["checkpoints"] > 2 else []),
    ]


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def write() -> int:
    """The page, of the newest row of each run. How many bars are missed; a run that was not made misses its own."""
    newest = {row["run"]: row for row in kept()}
    lines, notes, count = [], [], sum(kind not in newest for kind in STEPS)
    for kind, row in newest.items():
        faults = missed(row)
        count += len(faults)
        notes += [f"* **{kind}: {fault}**" for fault in faults]
        more, checked = row["open_more"], f"{row['date']}, {row['commit']}, {row['hardware']}"
        lines.append(
            f"| {kind} | {row['steps']:,} | {row['processes_of_run']} | {row['first_mib']:.1f} → "
            f"{row['last_mib']:.1f} | {row['mib_per_1000']:+.3f} "
            f"({row['low']:+.3f} to {row['high']:+.3f}) | < {MOST_MIB[kind]:g} | {more['files']:+d} / "
            f"{more['threads']:+d} / {more['processes']:+d} | "
            f"{len(row['left'])} | {row['seconds']:,} | {checked} |"
        )
    RESULTS.write_text(
        "# Long runs\n\n"
        "Command: `python benchmarks/soak.py` (`make soak`); one run alone with `--only`  \nHardware, "
        "date and commit: in each row; one thread, no GPU\n\n"
        "Tiny models (2 layers of 64) through `ptf.run.run`, with all that is written by default (TensorBoard too), "
        "a checkpoint and held-out\n"
        "measurements every 50 steps, two checkpoints kept. GRPO: our own decoder as the engine, "
        "8 prompts with 4 answers each, two updates a step, a\n"
        "reference model, the reward in a process of its own. Memory is the PSS of all processes of the run, "
        "once a second; pages of mapped\n"
        "files count whole in each, since the share that PSS counts changes with whatever else runs on the machine. "
        "The slope is of a line through means of\n"
        f"{BLOCK} steps, the first {FIRST} left out, with its 95 % interval (widened by the correlation of "
        "neighbours).\n"
        "Open more: files, threads and child processes that the run's process has after the long run and had not "
        "after a short one before. Left: processes,\n"
        "shared memory, temporary and unfinished files after its end.\n\n"
        + ("\n".join([*notes, "", ""]) if notes else "")
        + "| run | steps | processes | MiB, from step 500 to the end | MiB in 1,000 steps (95 %) "
        "| bar | open more | left | seconds | measured |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}; {count} missed")
    return count


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        kind, place, steps, seed = sys.argv[2:]
        measured(kind, Path(place), int(steps), int(seed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="a shorter look, of which nothing is kept")
    asked = parser.parse_args()
    for kind in asked.only:
        row = soaked(kind, asked.steps or STEPS[kind], asked.seed)
        print(json.dumps(row), flush=True)
        if not asked.steps:
            with KEPT.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0 if asked.steps else min(1, write())


if __name__ == "__main__":
    sys.exit(main())
