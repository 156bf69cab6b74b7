"""Two resumes of one run at once, again and again: one ends with the bits of the run that never stopped, the other says
why it stopped. Writes results/two_resumes.md.

    python benchmarks/two_resumes.py [--trials 50] [--seed 0]

Each trial begins a tiny SFT run, kills it (SIGKILL) at a random moment, and starts two resumes of it, with a random
delay between them. On disk they share the run's directory; on S3 (a server on loopback) they share its checkpoints
alone, as two machines do. In every third trial the resume that holds the lease is killed too, and a third one must go
on without waiting. Prints a JSON line for each trial; ends with status 1 if anything is not so.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from commands import ROOT, options
from flow_runs import results_page
from pages import head, table, write_page

os.environ["OMP_NUM_THREADS"] = "1"
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


ABOUT = """\
A tiny SFT run of 24 steps with a checkpoint every 5 is killed (SIGKILL) at a random moment and resumed twice at once,
the second after 0 to 0.5 s. In every third trial the resume that holds the lease is killed as well, as soon as the
other one has been refused, and a third one is started.

"""
NAMES = (
    "store | trials | holder killed too | one ended, one said why it stopped | one after the other, both ended | "
    "something else"
)
END = """
Every run that ended has the bits of the one that never stopped: metrics but clock fields, exported weights, and the
SHA-256 of weights and optimizer in its last checkpoint. Every other one named the process that holds the lease, since
when, and how to take over. None waited for a heartbeat of a process that was killed."""


def row(store: str, found: list[dict]) -> list[object]:
    ways = Counter((one["ended"], one["refused"]) for one in found)
    wrong = sum(bool(one["wrong"]) for one in found)
    killed = sum(one["killed"] for one in found)
    return [STORES[store], len(found), killed, ways[1, 1], ways[2, 0], f"**{wrong}**"]


def main() -> int:
    asked = options(__doc__, trials=50, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        found = {store: trials(store, asked.trials, asked.seed, Path(scratch)) for store in STORES}
    lines = table(NAMES, [row(store, of) for store, of in found.items()])
    wrong = [store for store, of in found.items() if any(one["wrong"] for one in of)]
    return write_page(results_page("two_resumes.md"), head("Two resumes at once") + ABOUT, [lines, END], wrong)


if __name__ == "__main__":
    sys.exit(main())
