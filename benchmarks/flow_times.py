"""What people wait for who do nothing new: `show` of every flow, and the resume of a run that has ended. Writes
results/flow_times.md; exits 1 where a bar is missed.

    python benchmarks/flow_times.py [--times 5]
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.flow_runs import cpu  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "flow_times.md"
SHOW_S, RESUME_S = 1.5, 15.0
TINY = [
    "train.steps=4",
    "train.lr_decay_steps=1",
    "train.lr_decay_at_loss=null",
    "train.validate_every=2",
    "evaluate.limit=8",
    "evaluate.samples_per_prompt=2",
    "compute.launcher=local",
    "compute.device=cpu",
]


def seconds(line: Sequence[str], directory: Path) -> tuple[float, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")} | {
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(directory)
    }
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *line], cwd=directory, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - began, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for flow in sorted((ROOT / "flows").glob("*_flow.py")):
            rows.append(
                (f"`{flow.name} show`", SHOW_S, [seconds([str(flow), "show"], directory)[0] for _ in range(times)])
            )
        flow, config = str(ROOT / "flows" / "sft_flow.py"), str(ROOT / "configs" / "tiny" / "sft.yaml")
        taken, said = seconds(
            [flow, "run", "--config", config, *(word for change in TINY for word in ("--set", change))], directory
        )
        rows.append(("`sft_flow.py run`, 4 steps, for comparison", None, [taken]))
        (run,) = re.findall(r"run-id (\d+)", said)
        rows.append(
            (
                "`sft_flow.py resume` of it",
                RESUME_S,
                [seconds([flow, "resume", "--origin-run-id", run], directory)[0] for _ in range(times)],
            )
        )
    lines = ["| command | bar, s | median s | from – to | |", "|---|---|---|---|---|"]
    for what, bar, taken in rows:
        middle = statistics.median(taken)
        met = bar is None or middle < bar
        missed += not met
        lines.append(
            f"| {what} | {bar or ''} | {middle:.2f} | {min(taken):.2f} – {max(taken):.2f} | "
            f"{'' if bar is None else 'met' if met else 'missed'} |"
        )
    RESULTS.write_text(
        "# What one waits for who does nothing new\n\n"
        f"Command: `python benchmarks/flow_times.py`  \nHardware: {cpu()}, no GPU  \nDate: "
        f"{time.strftime('%Y-%m-%d')}, each {times} times\n\n" + "\n".join(lines) + "\n"
    )
    print("\n".join(lines), f"\nwrote {RESULTS.relative_to(ROOT)}; {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
