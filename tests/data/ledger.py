"""A ledger of samples: what is trained through real sources, shuffles, mixer,
packer and loader while the number of workers changes.

    python -m tests.data.ledger [samples [page]]

With `page`, a Markdown file is written that says how it was. Ends with status 1 if a sample was lost or came twice.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.sources.rows import SourceSpec
from tests.data.trials import BASE, SEQ_LEN, Trial, ranks, state_of

PARTITIONS, SEQUENCES = 8, 16


def numbered(row: dict[str, Any], source: str) -> list[PackUnit]:
    """A document that begins with its number."""
    n = row["n"]
    tokens = np.full(2 + n % 37, n % 7, np.int32)
    tokens[:2] = n // BASE, n % BASE
    return [(Document(tokens, np.ones(len(tokens), np.float32), source),)]


def numbers(batch: Batch) -> np.ndarray:
    """Of the documents in it; what fills up sequences is one token and no document."""
    first = np.cumsum([0, *batch.lengths])[:-1]
    flat = batch.tokens[batch.segments >= 0].numpy()
    kept = first[np.array(batch.lengths) > 1]
    return flat[kept] * BASE + flat[kept + 1]


def ledger(samples: int, directory: Path) -> np.ndarray:
    """How often each of `samples` samples was trained in one epoch, while 1, 2,
    4 and 1 workers each resume from the states before them."""
    order = np.random.default_rng(0).permutation(samples)
    cut = samples // 3
    for name, part in {"a": order[:cut], "b": order[cut:]}.items():
        (directory / f"{name}.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in part))
    sources = {
        name: SourceSpec(str(directory / f"{name}.jsonl"), weight, epochs=1)
        for name, weight in {"a": 1.0, "b": 1.5}.items()
    }
    run = Trial({}, {}, {}, PARTITIONS, SEQUENCES, 1, {"exhausted": "drop"}, 64, None, [], 0, False, seed=1)
    state: dict[str, Any] | None = None
    counts = np.zeros(samples, np.int32)
    steps = samples * 20 // (SEQUENCES * SEQ_LEN)  # about
    for world, share in ((1, 0.2), (2, 0.3), (4, 0.3), (1, 9.0)):
        with ranks(run, sources, None, world, state, encode=numbered) as loaders:
            for _ in range(int(share * steps) + 1):
                found = np.concatenate([numbers(batch) for loader in loaders for batch in next(loader)])
                np.add.at(counts, found, 1)
                if not len(found):
                    break
            state = state_of(loaders)
    return counts


def page(found: dict[str, Any], command: str) -> str:
    from benchmarks.flow_runs import commit, cpu

    return (
        "# The ledger of samples\n\n"
        f"Command: `{command}` (`make ledger`)  \nHardware: {cpu()}; {found['cpu_s']:.0f} s of one core  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}\n\n"
        f"{found['samples']:,} documents of 2 to 38 tokens, a third of them in one source and the rest in another, "
        "each beginning with its number,\n"
        f"through everything that real data go through: files, shuffle, mixer, packer, loader; "
        f"{PARTITIONS} partitions, sequences of {SEQ_LEN} tokens, {SEQUENCES} a step, one\n"
        "epoch of each source. About a fifth of the steps are dealt to 1 worker, three tenths to 2, "
        "three tenths to 4 and the rest to 1 again; at each\n"
        "change the loaders are closed, their states pass through bytes, and new loaders go on from there. "
        "Every number in every batch is entered in a\n"
        "ledger.\n\n"
        "| what | found |\n|---|---|\n"
        f"| samples | {found['samples']:,} |\n| never trained | **{found['lost']:,}** |\n"
        f"| trained more than once | **{found['repeated']:,}** |\n\n"
        "The suite does the same with 40,000 samples, and sees what is lost where a state is not carried over "
        "(`tests/data/test_loader.py`).\n"
    )


def main() -> None:
    samples, began = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        counts = ledger(samples, Path(directory))
    found = {
        "samples": samples,
        "lost": int((counts == 0).sum()),
        "repeated": int((counts > 1).sum()),
        "cpu_s": round(time.process_time() - began, 1),
    }
    print(json.dumps(found))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(page(found, " ".join(["python -m tests.data.ledger", *sys.argv[1:]])))
    sys.exit(1 if found["lost"] or found["repeated"] else 0)


if __name__ == "__main__":
    main()
