"""How a tiny run takes being killed, and going on for long. Writes results/reliability.md.

    python benchmarks/reliability.py [--kills 220] [--soak 2000]

Kills: at visits to phases of a step and a save, at file operations, at the first byte over a size in whatever file (inside writes), and at moments
on the clock. Each killed run is continued and must end as one that never stopped: bit-equal metrics (clock fields aside), exported weights,
weights and optimizer of its last checkpoint. Prints one JSON line a part; ends with status 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.reliability.kills import Trap, attempt, counted, job, result, survives  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reliability.md"


def traps(counts: dict[str, int], seconds: float, count: int) -> list[Trap]:
    """As many of each kind, spread over all that there is, without any twice."""
    rng, each = Random(0), -(-count // 4)
    spread = lambda most: sorted({1 + round(k * (most - 1) / (each - 1)) for k in range(each)})  # noqa: E731
    return [
        *(Trap("phase", n) for n in spread(counts["phase"])), *(Trap("file", n) for n in spread(counts["file"])),
        *(Trap("bytes", n) for n in sorted({int(np.exp(rng.uniform(0, np.log(counts["bytes"])))) for _ in range(3 * each)})[:: 3][:each]),
        *(Trap("time", round(rng.uniform(0.02, seconds), 4)) for _ in range(each)),
    ]  # fmt: skip


def kills(directory: Path, count: int) -> dict[str, Any]:
    log, raw = directory / "log", job(directory)
    began = time.perf_counter()
    assert attempt(raw, "whole", None, log) == 0, log.read_text()[-3000:]
    seconds = time.perf_counter() - began
    whole = result(directory / "runs" / "whole")
    reached, missed, wrong = Counter(), Counter(), []
    for n, trap in enumerate(traps(counted(raw, log), seconds, count)):
        killed, difference = survives(raw, whole, trap, f"killed-{n}", log)
        (reached if killed else missed)[trap.kind] += 1
        if difference:
            wrong.append(f"{trap}: {difference}")
            print(wrong[-1], flush=True)
        else:
            shutil.rmtree(directory / "runs" / f"killed-{n}")
    return {"kills": dict(reached), "not_reached": dict(missed), "wrong": wrong}


def soak(directory: Path, steps: int) -> dict[str, Any]:
    """Growth of resident memory, and what was left open, over many tiny steps in this process."""
    raw = job(directory)
    raw["train"] |= {"steps": steps, "validate_every": 50}
    raw["checkpoint"] = {"every": 50, "keep": 2}
    with (directory / "log").open("w") as out, contextlib.redirect_stdout(out):
        run(loads(yaml.safe_dump({**raw, "train": raw["train"] | {"steps": 12, "validate_every": 4}})), "warm")
        before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        run(loads(yaml.safe_dump(raw)), "soak")
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    rows = [row for row in read_metrics(directory / "runs" / "soak" / "metrics.jsonl") if row["step"] > steps // 4]
    slope = np.polyfit([row["step"] for row in rows], [row["mem_gib"] * 1024 for row in rows], 1)[0] * 1000
    left = [p for p in (directory / "runs" / "soak").rglob("*") if p.name.startswith(".") and p.name not in (".metadata", ".lease.json.lock")]
    return {"steps": steps, "mib_per_1000_steps": float(slope), "open_files": after[0] - before[0], "threads": after[1] - before[1], "files_left": len(left)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=220)
    parser.add_argument("--soak", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("kills", "soak"):
            (root / name).mkdir()
        killed = kills(root / "kills", asked.kills)
        print(json.dumps(killed), flush=True)
        long = soak(root / "soak", asked.soak)
        print(json.dumps(long), flush=True)
    total = sum(killed["kills"].values())
    kinds = {"phase": "before and after phases of a step and a save", "file": "at file operations", "bytes": "inside writes", "time": "at moments on the clock"}
    rows = "".join(f"| {kinds[kind]} | {n} |\n" for kind, n in killed["kills"].items())
    RESULTS.write_text(
        "# Reliability\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/reliability.py', *sys.argv[1:]])}`  \nHardware: {cpu()}  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        "A tiny SFT run of 12 steps with a checkpoint every 3, killed and continued. Equal means to the bit: metrics but clock fields, exported weights,\n"
        "weights and optimizer state of the last checkpoint.\n\n"
        f"| killed | times |\n|---|---|\n{rows}| **together** | **{total}** |\n| **did not end as the run that never stopped** | "
        f"**{len(killed['wrong'])}** |\n\n"
        f"{sum(killed['not_reached'].values())} further traps were not reached by the run (a moment after its end, say) and count for nothing.\n\n"
        f"{asked.soak:,} tiny steps with a checkpoint and a held-out loss every 50: resident memory grows by {long['mib_per_1000_steps']:.2f} MiB per 1,000\n"
        f"steps, {long['open_files']} files and {long['threads']} threads more than before are open, {long['files_left']} unfinished files are left.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")
    sys.exit(1 if killed["wrong"] or long["mib_per_1000_steps"] > 1 or long["open_files"] > 0 else 0)


if __name__ == "__main__":
    main()
