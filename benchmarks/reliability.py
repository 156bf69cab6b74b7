"""How a tiny run takes its checkpoints being damaged, and going on for long. Writes results/reliability.md. (Kills: benchmarks/kills.py.)

    python benchmarks/reliability.py [--mutations 2000] [--soak 2000]

Prints one JSON line a part; ends with status 1 if damage is loaded, or memory or files are left.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
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
from tests.reliability.kills import attempt, job  # noqa: E402
from tests.reliability.mutations import sweep  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reliability.md"


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
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--soak", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("mutations", "soak"):
            (root / name).mkdir()
        raw = job(root / "mutations")
        raw["checkpoint"]["keep"] = 3
        assert attempt(raw, "whole", None, root / "log") == 0
        outcomes, silent = sweep(root / "mutations" / "runs" / "whole" / "checkpoints", root, asked.mutations)
        print(json.dumps({"mutations": asked.mutations, "outcomes": outcomes, "silent": silent}), flush=True)
        long = soak(root / "soak", asked.soak)
        print(json.dumps(long), flush=True)
    ends = "".join(f"| {name} | {n} |\n" for name, n in sorted(outcomes.items()))
    RESULTS.write_text(
        "# Reliability\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/reliability.py', *sys.argv[1:]])}`  \nHardware: {cpu()}  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"Checkpoints damaged {asked.mutations:,} times (truncated, one bit flipped, a file dropped, two swapped, one from another step, one that has grown);\n"
        f"what a run would then continue from:\n\n| | times |\n|---|---|\n{ends}| **one that is not what was written** | **{len(silent)}** |\n\n"
        f"{asked.soak:,} tiny steps with a checkpoint and a held-out loss every 50: resident memory grows by {long['mib_per_1000_steps']:.2f} MiB per 1,000\n"
        f"steps, {long['open_files']} files and {long['threads']} threads more than before are open, {long['files_left']} unfinished files are left.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")
    sys.exit(1 if silent or long["mib_per_1000_steps"] > 1 or long["open_files"] > 0 else 0)


if __name__ == "__main__":
    main()
