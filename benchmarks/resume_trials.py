"""Random trials of stopping and resuming, with their page.

    python benchmarks/resume_trials.py [--trials 500] [--seed 0] [--most 100] [--trial 387] [--again]

Each trial draws sources (1 to 3, of 1 to 10,000 rows, as jsonl, gzip, parquet or tokenized), a mixture of every mode, 1
to 512 partitions, a shuffle, a limit and epochs; trains without a stop; trains again with two to five stops, each time
on another number of ranks, of which some exchange sequences; and compares every step. Every trial is a line of
results/resume_trials.jsonl, and those that are there are not made again (all are with `--again`), so it can be stopped
and started: `--most` says how many are made at a time. The page is written from the lines. `--trial` makes a single
one, and keeps nothing. Prints a line for each trial that differs, and exits with 1 if there is one.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from commands import options
from flow_runs import commit, results_page
from pages import Row, head, keep, kept, table, today, write_page

from ptf.data.character_tokenizer import character_tokenizer
from tests.data.trials import Trial, tried

RESULTS = results_page("resume_trials.md")
LEDGER = RESULTS.with_suffix(".jsonl")
MOST_ROWS, MOST_PARTITIONS = 10_000, 512
FAULTS = {
    "differences": "steps that differ from the run that never stopped",
    "not_once": "samples that did not come once an epoch, without weights or with `drop`",
    "not_said": "sources whose passes, or runs whose steps, are other than announced",
}


def mode_of(trial: Trial) -> str:
    if any(trial.weights.values()):
        return f"weights, {trial.mixture['by']}, {trial.mixture['exhausted']}"
    return "no weights" if trial.mixture["temperature"] == 1 else "no weights, temperature"


def made(seed: int, i: int) -> tuple[Trial, Row]:
    """Trial i of a seed, and what is kept of it."""
    trial, began = Trial.drawn(random.Random(f"{seed}/{i}"), MOST_ROWS, MOST_PARTITIONS), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = character_tokenizer("abc", Path(directory) / "tokenizer")
        found = tried(trial, Path(directory), tokenizer)
    formats = sorted(set(trial.formats.values()))
    return trial, {
        "seed": seed,
        "trial": i,
        **asdict(found),
        "partitions": trial.partitions,
        "mode": mode_of(trial),
        "formats": formats,
        "rows": sum(trial.sizes.values()),
        "stops": len(trial.worlds) - 1,
        "exchange": trial.exchange,
        "cpu_s": round(time.process_time() - began, 2),
    }


def failed(line: Row) -> bool:
    return any(line[fault] for fault in FAULTS)


def ledger(seed: int) -> list[Row]:
    return [line for line in kept(LEDGER) if line["seed"] == seed]


def page(lines: Sequence[Row], seed: int, wanted: int) -> int:
    """Write the page; return 1 where a trial failed."""

    def counted(key: str) -> str:
        return ", ".join(f"{value}: {n}" for value, n in sorted(Counter(line[key] for line in lines).items()))

    formats = Counter(name for line in lines for name in line["formats"])
    sums = {key: sum(line[key] for line in lines) for key in ("steps", "stops", "cpu_s", "exchange", *FAULTS)}
    date = f"{max(line['date'] for line in lines)}  \nTrials by commit: {counted('commit')}"
    command = f"`python benchmarks/resume_trials.py --trials {wanted} --seed {seed}`"
    about = head("Resume trials", "", date, command) + (
        f"{len(lines)} of {wanted} random trials, {sums['steps']:,} steps, {sums['stops']:,} stops,\n"
        f"{sums['cpu_s']:,.0f} s of CPU. Rows 1 to {MOST_ROWS:,} a source, worlds of 1, 2, 4 and 8 ranks that change "
        f"at every stop;\nin {sums['exchange']} trials the ranks exchange sequences.\n\n"
    )
    rows = [[what, str(sums[fault])] for fault, what in FAULTS.items()]
    largest = f"{max(line['state_bytes'] for line in lines):,} bytes"
    rows.append(["state of a partition, the largest (shuffle windows up to 64)", largest])
    modes = counted("mode").replace(", weights", "; weights").replace(", no", "; no")
    more = [
        "Passes are compared to within rounding: a row that leaves no sample counts with the first sample that its "
        "partition reads after it.",
        f"Trials by partitions: {counted('partitions')}",
        f"Trials by mixture: {modes}",
        f"Trials that have a source in the format: {', '.join(f'{name}: {n}' for name, n in sorted(formats.items()))}",
    ]
    wrong = [f"trial {line['trial']}" for line in lines if failed(line)]
    return write_page(RESULTS, about, [table("what | found", rows), *(f"\n{words}" for words in more)], wrong)


def main() -> int:
    given = options(__doc__, trials=500, seed=0, most=None, trial=None, again=False)
    if given.trial is not None:
        trial, line = made(given.seed, given.trial)
        print(f"{line}\n{trial}")
        return int(failed(line))
    if given.again:
        LEDGER.unlink(missing_ok=True)
    there = {line["trial"] for line in ledger(given.seed)}
    wanted = [i for i in range(given.trials) if i not in there][: given.most]
    version, began = commit(), time.perf_counter()
    for n, i in enumerate(wanted, 1):
        trial, line = made(given.seed, i)
        keep(LEDGER, {**line, "commit": version, "date": today()})
        if failed(line):
            print(f"trial {i}: {line} {trial}", flush=True)
        elif n % 10 == 0:
            print(f"{n} trials, {time.perf_counter() - began:.0f} s", flush=True)
    return page(ledger(given.seed), given.seed, given.trials)


if __name__ == "__main__":
    sys.exit(main())
