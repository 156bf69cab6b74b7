"""Files of every kind that a run reads again, damaged: is it ever silent? Writes results/damage.md, and
results/damage.jsonl as it goes.

    python benchmarks/damage.py [--trials 400]

Of each kind so many trials, in batches of 100 by seed; a batch that damage.jsonl has is not made again. Each trial puts
tiny real files back as ptf left them, harms one (tests/reliability/damage.py), and reads them as a run does
(tests/reliability/scenes.py). Ends with status 1 if a trial was silent, or ended in an error that names no file.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import options
from benchmarks.flow_runs import results_page
from benchmarks.pages import Row, head, keep, kept, table, write_page
from tests.reliability.damage import OUTCOMES, trials
from tests.reliability.scenes import SCENES, Made

RESULTS = results_page("damage.md")
BATCH = 100


def run(count: int, ledger: Path) -> None:
    """Append the batches that are missing."""
    done = {(batch["kind"], batch["seed"]) for batch in kept(ledger)}
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(Made(Path(scratch))) as made:
        os.environ["PTF_CACHE"] = f"{scratch}/cache"
        for kind, make in SCENES.items():
            seeds = [seed for seed in range(-(-count // BATCH)) if (kind, seed) not in done]
            if not seeds:
                continue
            with (Path(scratch) / "log").open("a") as log, contextlib.redirect_stdout(log):
                scene = make(made)
            whole = Path(scratch) / "whole" / make.__name__
            shutil.copytree(scene.root, whole)
            for seed in seeds:
                began = time.process_time()
                outcomes, faults = trials(scene, whole, BATCH, seed)
                batch = {
                    "kind": kind,
                    "seed": seed,
                    "trials": BATCH,
                    "outcomes": outcomes,
                    "faults": faults,
                    "cpu_s": round(time.process_time() - began, 2),
                }
                keep(ledger, batch)
                print(json.dumps(batch), flush=True)


def page(found: list[Row]) -> str:
    rows, whole = list[list[str]](), Counter[str]()
    for kind in SCENES:
        of_kind, outcomes = [batch for batch in found if batch["kind"] == kind], Counter[str]()
        for batch in of_kind:
            outcomes.update(batch["outcomes"] | {"trials": batch["trials"], "faults": len(batch["faults"])})
        whole.update(outcomes)
        rows.append([kind, *counted(outcomes)])
    rows.append(["**together**", f"**{whole['trials']:,}**", *counted(whole)[1:]])
    faults = "".join(f"* {fault}\n" for batch in found for fault in batch["faults"])
    names = "files | trials | refused | older, said | no consequence | same bytes | **silent**"
    return f"{table(names, rows)}\n\n{faults}{OUTSIDE}"


def counted(outcomes: Counter[str]) -> list[str]:
    return [f"{outcomes[name]:,}" for name in ("trials", *OUTCOMES)] + [f"**{outcomes['faults']}**"]


ABOUT = """\
In each trial one file of those that a tiny run left, or two, are harmed: cut off, one bit flipped, gone, swapped with
another (whole directories too), replaced by the one of another run, step or version, or longer than it was. Half of the
trials read the files once before that, so that what is remembered of them is put to the test. Then they are read by the
call with which a run reads them. What comes of it:

* *refused*: an error that a user is meant to read, which names the file or its directory;
* *older, said*: a run goes on from an older checkpoint, or without the file, and the console says which and why;
* *no consequence*: what was read is what was written all the same: the file was not the one that counts, or it was made
  or fetched again;
* *same bytes*: the harm changed nothing (a file that is equal in both runs was put in the place of itself);
* **silent**: something else was read than was written and nobody said so, or the error names no file.

"""
OUTSIDE = """
What is outside of it, because nothing says what it should hold: raw data files that were rewritten with the same name
and size, weights of models that ptf did not publish, and an older `latest.json` of the same directory put back, which
is a rollback. [resume.md](../../docs/resume.md) has the list."""


def main() -> int:
    asked = options(__doc__, trials=(400, "of each kind"), results=RESULTS)
    ledger = asked.results.with_suffix(".jsonl")
    run(asked.trials, ledger)
    found = kept(ledger)
    command = f"`python benchmarks/damage.py --trials {asked.trials}` (`make damage`)"
    spent = f"; {sum(batch['cpu_s'] for batch in found):.0f} s of one core"
    about = head("Damaged files", spent, command=command).rstrip()
    about += f"  \nEach batch of 100 trials: [damage.jsonl](damage.jsonl)\n\n{ABOUT}"
    return write_page(asked.results, about, [page(found)], [f for batch in found for f in batch["faults"]])


if __name__ == "__main__":
    sys.exit(main())
