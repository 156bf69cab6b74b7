"""What people wait for who do nothing new: `show` of every flow, and the resume of a run that has ended. Writes
results/flow_times.md; exits 1 where a bar is missed.

    python benchmarks/flow_times.py [--times 5]
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from commands import ROOT, options
from flow_runs import results_page
from pages import head, table, write_page

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
    times = options(__doc__, times=5).times
    rows = list[tuple[str, float | None, list[float]]]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for flow in sorted((ROOT / "flows").glob("*_flow.py")):
            taken = [seconds([str(flow), "show"], directory)[0] for _ in range(times)]
            rows.append((f"`{flow.name} show`", SHOW_S, taken))
        flow, config = str(ROOT / "flows" / "sft_flow.py"), str(ROOT / "configs" / "tiny" / "sft.yaml")
        changes = [word for change in TINY for word in ("--set", change)]
        once, said = seconds([flow, "run", "--config", config, *changes], directory)
        rows.append(("`sft_flow.py run`, 4 steps, for comparison", None, [once]))
        (run,) = re.findall(r"run-id (\d+)", said)
        taken = [seconds([flow, "resume", "--origin-run-id", run], directory)[0] for _ in range(times)]
        rows.append(("`sft_flow.py resume` of it", RESUME_S, taken))
    missed = [what for what, bar, taken in rows if bar and median(taken) >= bar]
    cells = []
    for what, bar, taken in rows:
        verdict = "" if bar is None else "missed" if what in missed else "met"
        cells.append([what, bar or "", f"{median(taken):.2f}", f"{min(taken):.2f} – {max(taken):.2f}", verdict])
    lines = table("command | bar, s | median s | from – to | ", cells)
    print(lines)
    about = head("What one waits for who does nothing new") + f"Each {times} times.\n\n"
    return write_page(results_page("flow_times.md"), about, [lines], missed)


if __name__ == "__main__":
    sys.exit(main())
