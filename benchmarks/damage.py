"""Files of every kind that a run reads again, damaged: is it ever silent? Writes results/damage.md, and
results/damage.jsonl as it goes.

    python benchmarks/damage.py [--trials 400]

Of each kind so many trials, in batches of 100 by seed; a batch that damage.jsonl has is not made again. Each trial puts
tiny real files back as ptf left them, harms one (tests/reliability/damage.py), and reads them as a run does
(tests/reliability/scenes.py). Ends with status 1 if a trial was silent, or ended in an error that names no file.
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
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from tests.reliability.damage import OUTCOMES, trials  # noqa: E402
from tests.reliability.scenes import SCENES, Made  # noqa: E402

RESULTS = results_page("damage.md")
BATCH = 100


def batches(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def run(count: int, ledger: Path) -> None:
    """Append the batches that are missing."""
    done = {(batch["kind"], batch["seed"]) for batch in batches(ledger)}
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
                with ledger.open("a") as file:
                    file.write(json.dumps(batch) + "\n")
                print(json.dumps(batch), flush=True)


def page(found: list[dict[str, Any]], command: str) -> str:
    rows, whole = "", Counter[str]()
    for kind in SCENES:
        of_kind, outcomes = [batch for batch in found if batch["kind"] == kind], Counter[str]()
        for batch in of_kind:
            outcomes.update(batch["outcomes"] | {"trials": batch["trials"], "faults": len(batch["faults"])})
        whole.update(outcomes)
        rows += (
            f"| {kind} | {outcomes['trials']:,} | "
            + " | ".join(f"{outcomes[name]:,}" for name in OUTCOMES)
            + f" | **{outcomes['faults']}** |\n"
        )
    total = " | ".join(f"{whole[name]:,}" for name in OUTCOMES)
    faults = "".join(f"* {fault}\n" for batch in found for fault in batch["faults"])
    return (
        "# Damaged files\n\n"
        f"Command: `{command}` (`make damage`)  \nHardware: {cpu()}; {sum(batch['cpu_s'] for batch in found):.0f} s "
        "of one core  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}  \nEach batch of 100 trials: "
        "[damage.jsonl](damage.jsonl)\n\n"
        "In each trial one file of those that a tiny run left, or two, are harmed: cut off, one bit flipped, gone, "
        "swapped with another (whole directories\n"
        "too), replaced by the one of another run, step or version, or longer than it was. "
        "Half of the trials read the files once before that, so that\n"
        "what is remembered of them is put to the test. Then they are read by the call with which a run reads them. "
        "What comes of it:\n\n"
        "* *refused*: an error that a user is meant to read, which names the file or its directory;\n"
        "* *older, said*: a run goes on from an older checkpoint, or without the file, "
        "and the console says which and why;\n"
        "* *no consequence*: what was read is what was written all the same: the file was not the one that counts, "
        "or it was made or fetched again;\n"
        "* *same bytes*: the harm changed nothing (a file that is equal in both runs was put in the place of itself);\n"
        "* **silent**: something else was read than was written and nobody said so, or the error names no file.\n\n"
        "| files | trials | refused | older, said | no consequence | same bytes | **silent** |\n"
        f"|---|---|---|---|---|---|---|\n{rows}"
        f"| **together** | **{whole['trials']:,}** | {total} | **{whole['faults']}** |\n\n{faults}"
        + ("" if not faults else "\n")
        + "What is outside of it, because nothing says what it should hold: "
        "raw data files that were rewritten with the same name and size, weights of\n"
        "models that ptf did not publish, and an older `latest.json` of the same directory put back, "
        "which is a rollback.\n"
        "[resume.md](../../docs/resume.md) has the list.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="of each kind")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    ledger = asked.results.with_suffix(".jsonl")
    run(asked.trials, ledger)
    found = batches(ledger)
    asked.results.write_text(page(found, f"python benchmarks/damage.py --trials {asked.trials}"))
    print(f"wrote {asked.results}")
    sys.exit(1 if any(batch["faults"] for batch in found) else 0)


if __name__ == "__main__":
    main()
