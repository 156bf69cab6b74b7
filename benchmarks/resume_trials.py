"""Random trials of stopping and resuming, with their page.

    python benchmarks/resume_trials.py [--trials 500] [--seed 0]

Each trial draws sources (1 to 3, of 1 to 10,000 rows, as jsonl, gzip, parquet or tokenized), a mixture of every mode, 1 to 512 lanes, a shuffle, a
limit and epochs; trains without a stop; trains again with two to five stops, each time on another number of ranks, of which some exchange rows; and
compares every step. Prints a line for each trial that differs, and exits with 1 if there is one.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from flow_runs import ROOT, cpu

from ptf.data.tokenizer import character_tokenizer
from tests.data.trials import Trial, tried

RESULTS = ROOT / "benchmarks" / "results" / "resume_trials.md"
MOST_ROWS, MOST_LANES = 10_000, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began, wrong, lanes, modes, steps, state = time.perf_counter(), Counter[str](), Counter[int](), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = character_tokenizer("abc", Path(scratch) / "tokenizer")
        for i in range(given.trials):
            trial = Trial.drawn(random.Random(f"{given.seed}/{i}"), MOST_ROWS, MOST_LANES)
            with tempfile.TemporaryDirectory() as directory:
                found = tried(trial, Path(directory), tokenizer)
            weighted = any(trial.weights.values())
            modes[f"weights, {trial.mixture['by']}, {trial.mixture['exhausted']}" if weighted else "no weights"] += 1
            lanes[trial.lanes] += 1
            steps, state = steps + found.steps, max(state, found.state_bytes)
            wrong.update(differences=found.differences, not_once=found.not_once, not_said=found.not_said)
            if found.differences or found.not_once or found.not_said:
                print(f"trial {i}: {found} {trial}", flush=True)
            elif i % 50 == 49:
                print(f"{i + 1} trials, {time.perf_counter() - began:.0f} s", flush=True)
    RESULTS.write_text(
        "# Resume trials\n\n"
        f"Command: `python benchmarks/resume_trials.py {' '.join(sys.argv[1:])}`  \nHardware: {cpu()}  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"{given.trials} random trials, {steps:,} steps, {time.perf_counter() - began:,.0f} s. Rows 1 to {MOST_ROWS:,} a source, worlds of 1, 2, 4 and 8 ranks that\n"
        "change at every stop.\n\n| what | found |\n|---|---|\n"
        f"| steps that differ from the run that never stopped | {wrong['differences']} |\n"
        f"| samples that did not come once an epoch, without weights or with `drop` | {wrong['not_once']} |\n"
        f"| passes or steps other than announced (a row a lane) | {wrong['not_said']} |\n"
        f"| state of a lane, the largest (shuffle windows up to 64) | {state:,} bytes |\n\n"
        "Trials by lanes: " + ", ".join(f"{n}: {lanes[n]}" for n in sorted(lanes)) + "\n\nTrials by mixture: "
        + "; ".join(f"{mode}: {n}" for mode, n in sorted(modes.items())) + "\n"
    )  # fmt: skip
    sys.exit(1 if wrong.total() else 0)


if __name__ == "__main__":
    main()
