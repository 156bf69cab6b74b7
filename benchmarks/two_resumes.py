"""Two resumes of one run at once, again and again: one ends with the bits of the run that never stopped, the other says
why it stopped. Writes results/two_resumes.md.

    python benchmarks/two_resumes.py [--trials 50] [--seed 0]

Each trial begins a tiny SFT run, kills it (SIGKILL) at a random moment, and starts two resumes of it, with a random
delay between them. On disk they share the run's directory; on S3 (a server on loopback) they share its checkpoints
alone, as two machines do. In every third trial the resume that holds the lease is killed too, and a third one must go
on without waiting. Prints a JSON line for each trial; ends with status 1 if anything is not so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.flow_runs import cpu, results_page  # noqa: E402

RESULTS = results_page("two_resumes.md")
STORES = {"disk": "disk (one directory)", "s3": "S3 (a directory each, checkpoints shared)"}


def trials(store: str, count: int, seed: int, scratch: Path) -> list[dict]:
    """What `tests.reliability.resumes` prints, a process of its own for each store."""
    (scratch / store).mkdir()
    command = [sys.executable, "-m", "tests.reliability.resumes", str(scratch / store), store, str(count), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        found = []
        for line in running.stdout:
            print(f"{store} {len(found) + 1}: {line.strip()}", flush=True)
            found.append(json.loads(line))
    if running.returncode or len(found) != count:
        sys.exit(f"{store}: ended with {running.returncode} after {len(found)} of {count} trials")
    return found


def row(store: str, found: list[dict]) -> str:
    ways = Counter((one["ended"], one["refused"]) for one in found)
    wrong = sum(bool(one["wrong"]) for one in found)
    killed = sum(one["killed"] for one in found)
    return f"| {STORES[store]} | {len(found)} | {killed} | {ways[1, 1]} | {ways[2, 0]} | **{wrong}** |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = {store: trials(store, asked.trials, asked.seed, Path(scratch)) for store in STORES}
    RESULTS.write_text(
        "# Two resumes at once\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/two_resumes.py', *sys.argv[1:]])}`  \n"
        f"Hardware: {cpu()}  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        "A tiny SFT run of 24 steps with a checkpoint every 5 is killed (SIGKILL) "
        "at a random moment and resumed twice at once, the second\n"
        "after 0 to 0.5 s. In every third trial the resume that holds the lease is killed as well, "
        "as soon as the other one has been refused,\n"
        "and a third one is started.\n\n"
        "| store | trials | holder killed too | one ended, one said why it stopped | one after the other, "
        "both ended | something else |\n"
        "|---|---|---|---|---|---|\n" + "".join(row(store, of) for store, of in found.items()) + "\n"
        "Every run that ended has the bits of the one that never stopped: metrics but clock fields, exported weights, "
        "and the SHA-256 of\n"
        "weights and optimizer in its last checkpoint. Every other one named the process that holds the lease, "
        "since when, and how to take\n"
        "over. None waited for a heartbeat of a process that was killed.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")
    sys.exit(1 if any(one["wrong"] for of in found.values() for one in of) else 0)


if __name__ == "__main__":
    main()
