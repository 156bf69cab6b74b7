"""How the cost of ptf's work grows with its size, with its page.

    python benchmarks/growth.py [--only WORDS] [--rounds 3]

Each kind of work (`WORKS`) is done at six sizes or more that span at least 30 times:
CPU-seconds of this process with one thread, rounds interleaved over the sizes, medians. The exponent is the slope of
log cost on log size, by least squares over the medians. Ends with status 1 if an exponent and two standard errors
exceed 1.15. The exponent between the two largest sizes is beside it: a part of the cost that is constant hides a bad
exponent at small sizes. Prints a JSON line a row, keeps the last one of each in results/growth.jsonl, and writes
results/growth.md from them. `--only`: the rows whose size and name contain the words are measured anew.
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import growth_data as data
from benchmarks import growth_training as training
from benchmarks.commands import options
from benchmarks.exponents import BOUND, Fit, fit
from benchmarks.flow_runs import results_page
from benchmarks.pages import Row, here, kept, table, told, write_page

PAGE = results_page("growth.md")
KEPT = PAGE.with_suffix(".jsonl")
LEAST_S = 0.03  # what is done faster is done several times


@dataclass(frozen=True)
class Work:
    """Work of ptf whose size can be chosen."""

    quantity: str  # what the size counts
    name: str
    sizes: tuple[int, ...]
    prepare: Callable[[Path, int], Callable[[], object]]  # in a directory of its own; what it returns is timed
    bound: float | None = BOUND

    @property
    def key(self) -> dict[str, str]:
        """Return what a result of this work is found by."""
        return {"quantity": self.quantity, "work": self.name}


def doubled(first: int) -> tuple[int, ...]:
    """Return six sizes that span 32 times."""
    return tuple(first * 2**i for i in range(6))


WORKS = (
    Work("tokens a document", "a text is encoded", doubled(1000), data.document_of_text),
    Work("tokens a document", "tokenized documents to batches", doubled(512), data.reading_of_long_documents),
    Work("tokens a document", "an optimizer step, attention in it", doubled(128), training.step_of_one_document, None),
    Work("turns a document", "a conversation is rendered and encoded", doubled(4), data.document_of_turns, None),
    Work("documents", "JSON lines to tokenized documents", doubled(16), data.tokenizing),
    Work("documents", "tokenized documents to batches", doubled(1000), data.reading),
    Work("documents", "JSON lines to batches", doubled(16), data.encoding),
    Work("documents", "the same, a document in a file", doubled(32), data.small_files),
    Work("documents", "continuing there", doubled(128), data.continuing_small_files),
    Work("documents", "an optimizer step", doubled(4), training.step_of_documents),
    Work("vocabulary", "an optimizer step", doubled(4000), training.step_of_vocabulary),
    Work("vocabulary", "log-probs within a nucleus", doubled(1000), training.nucleus_of_vocabulary),
    Work("vocabulary", "loading a tokenizer", doubled(5000), training.loading_of_vocabulary),
    Work("lanes", "the first sequence of each", doubled(8), data.first_of_lanes),
    Work("lanes", "eight sequences of each, with states", doubled(8), data.steps_of_lanes),
    Work("lanes", "continuing", doubled(4), data.continuing_lanes),
    Work("ranks", "the loaders of all ranks together", doubled(8), data.loaders_of_ranks),
    Work("ranks", "a rank's share of the rollouts of all", doubled(16), data.dealing_to_ranks),
    Work("sequences", "dealing to two ranks", doubled(64), data.dealing_sequences),
    Work("episodes", "a step of GRPO without its models", doubled(64), training.step_of_controller),
    Work("episodes", "packing and dealing", doubled(256), training.packing_of_episodes),
    Work("episodes", "writing and reading their state", doubled(32), training.state_of_episodes),
    Work("episodes", "in flight, one turn", doubled(16), training.flight_of_responses),
    Work("episodes", "in flight, four turns with environments", doubled(16), training.flight_of_environments),
    Work("MiB of weights", "writing, verifying and loading a checkpoint", doubled(1), training.checkpoint_of_bytes),
    Work("tensors", "writing, verifying and loading a checkpoint", doubled(32), training.checkpoint_of_tensors),
    Work("metrics rows", "writing", doubled(64), training.writing_metrics),
    Work("metrics rows", "continuing a run", doubled(500), training.continuing_metrics),
    Work("metrics rows", "reading a run", doubled(500), training.reading_a_run),
)
FLAT = 0.85  # an exponent between the two largest sizes below which the constant part prevails
ABOUT = """\
CPU-seconds of one call, of the whole process with one thread; the median of {rounds} rounds that take turns at the
sizes, of which there are six, each twice the one before. The exponent is the slope of log cost on log size. What is
asked is that it and two standard errors are at most {bound}. A constant part of the cost hides a bad exponent, so the
exponent between the two largest sizes stands beside it; it is of two medians, and moves where other processes compute.

Two rows have no bound. Attention compares every token of a document with those before it, so the cost of a step on one
document grows with the square of its tokens, once most of it is attention. A conversation is rendered anew for each
turn that is trained, because only its template knows what a server shows the model before that turn; these texts
together grow with the square of the turns. Each token is encoded once (`ptf/data/incremental_encode.py`)."""


def timed(run: Callable[[], object]) -> float:
    gc.collect()
    began, calls = time.process_time(), 0
    while not calls or time.process_time() - began < LEAST_S:
        run()
        calls += 1
    return (time.process_time() - began) / calls


def measured(work: Work, rounds: int) -> list[float]:
    """Return the median of the rounds at each size, after one round that does not count."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for size in work.sizes:
            directory = Path(scratch) / str(size)
            directory.mkdir()
            runs.append(work.prepare(directory, size))
            runs[-1]()
        found = [[timed(run) for run in runs] for _ in range(rounds)]
    return [median(costs) for costs in zip(*found, strict=True)]


def result(work: Work, rounds: int) -> Row:
    costs = measured(work, rounds)
    found = fit(work.sizes, costs)
    return {
        **work.key,
        "sizes": work.sizes,
        "cpu_s": costs,
        **asdict(found),
        "holds": found.within(work.bound),
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
        **here(),
    }


def line(work: Work, row: Row) -> list[str]:
    costs, found = row["cpu_s"], Fit(row["exponent"], row["standard_error"], row["local"])
    verdict = "no bound" if work.bound is None else "yes" if row["holds"] else "**no**"
    ends = [f"{work.sizes[0]:,} – {work.sizes[-1]:,}", f"{costs[0] * 1e3:,.1f} – {costs[-1] * 1e3:,.0f}"]
    exponent = f"{found.exponent:.3f} ± {found.standard_error:.3f}"
    return [work.quantity, work.name, *ends, exponent, f"{found.at_most:.3f}", f"{found.local:.2f}", verdict]


def steep(rows: Sequence[tuple[Work, Row]]) -> str:
    """Return a paragraph of the rows that may grow faster beyond these sizes, and of those that are mostly constant."""
    above = [f"{work.quantity}, {work.name} ({row['local']:.2f})" for work, row in rows if row["local"] > BOUND]
    flat = [f"{work.quantity}, {work.name} ({row['local']:.2f})" for work, row in rows if row["local"] < FLAT]
    said = ""
    if above:
        said += f"Between the two largest sizes the exponent is above {BOUND} for: {'; '.join(above)}.\n"
    if flat:
        said += f"It is below {FLAT} for what is still mostly constant, so the bound says little: {'; '.join(flat)}.\n"
    return f"{said}\n" if said else ""


def page(rows: Sequence[tuple[Work, Row]]) -> int:
    every = [row for _, row in rows]
    loads = [row["load"] for row in every]
    left = len(WORKS) - len(rows)
    about = (
        "# How costs grow\n\n"
        "Command: `python benchmarks/growth.py` (`make bench-growth`)  \n"
        f"Hardware: {told(every, 'hardware')}, one thread; load averages of {min(loads)} to {max(loads)} beside it  \n"
        f"Date: {told(every, 'date')}; commit {told(every, 'commit')}\n\n"
        f"{ABOUT.format(bound=BOUND, rounds=told(every, 'rounds'))}\n\n"
        + steep([(work, row) for work, row in rows if work.bound is not None])
        + (f"Not measured yet: {left} rows of {len(WORKS)}.\n\n" if left else "")
    )
    names = "size | work | sizes | CPU-ms at both ends | exponent ± standard error | + 2 of them"
    names += f" | between the two largest | ≤ {BOUND}"
    missed = [f"{work.quantity}, {work.name}" for work, row in rows if not row["holds"]]
    return write_page(PAGE, about, [table(names, [line(work, row) for work, row in rows])], missed)


def main() -> int:
    given = options(
        __doc__, only=("", "a word in the size or the name of a row"), rounds=3, page=(False, "write the page alone")
    )
    torch.set_num_threads(1)
    stored = kept(KEPT)
    for work in WORKS:
        if not given.page and given.only in f"{work.quantity}: {work.name}":
            stored = [row for row in stored if not row.items() >= work.key.items()] + [result(work, given.rounds)]
            print(json.dumps(stored[-1]), flush=True)
            KEPT.write_text("".join(json.dumps(row) + "\n" for row in stored))
    of = [(work, row) for work in WORKS for row in stored if row.items() >= work.key.items()]
    return page([(work, row) for work, row in of if tuple(row["sizes"]) == work.sizes])


if __name__ == "__main__":
    sys.exit(main())
