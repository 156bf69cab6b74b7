"""Whether documents of packed sequences see each other: 10,000 packings for each mixer and backend. Writes
results/leakage.md, and leakage.jsonl as it goes.

    python benchmarks/leakage.py [--packings 10000] [--minutes 7] [--models qwen3_next] [--context 1 2 4]

`--context` takes the mixers whose sequences so many ranks divide; 1 is those of one process. In batches of 1,000
packings by seed (tests/model/leakage.py says what is looked at); a batch that leakage.jsonl has is not made again, and
after so many minutes no further one is begun. Ends with status 1 if anything crossed, differed or was missed.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from commands import options
from flow_runs import commit, cpu, results_page
from pages import Row, keep, kept, table, today, write_page

from ptf.model.verify import TIE
from tests.model.leakage import MIXERS, Mixer, batch_of, divided, lengths, look, moved
from tests.model.ranks import on_processes

RESULTS = results_page("leakage.md")
BATCH = 1000
FAULTY = 100  # sequences of each fault in a batch
SIZES = {1: MIXERS, 2: divided(2), 4: divided(4)}  # by the ranks that divide a sequence
ALL = [mixer for mixers in SIZES.values() for mixer in mixers]
Wanted = tuple[Mixer, int, bool]  # mixer, seed, and whether forward


def about(mixer: Mixer, seed: int, began: float) -> Row:
    spent = round(time.process_time() - began, 1)
    return {"mixer": mixer.name, "path": mixer.path, "seed": seed, "packings": BATCH, "cpu_s": spent}


def packings(mixer: Mixer, rng: np.random.Generator) -> Iterator[tuple[list[list[int]], int]]:
    """Draw the packings of one batch, in parts, with their width."""
    for number in range(BATCH // mixer.sequences):
        width = mixer.widths[number % len(mixer.widths)]
        yield lengths(rng, mixer.sequences, width), width


def measured(mixer: Mixer, seed: int) -> Row:
    """Of one batch."""
    rng, crossing, apart, leaking, began = np.random.default_rng(seed), 0.0, 0.0, 0, time.process_time()
    documents = ties = 0
    for sequences, width in packings(mixer, rng):
        found = look(mixer, batch_of(sequences, rng, width), rng)
        documents += sum(map(len, sequences))
        crossing, apart = max(crossing, float(found.crossing.max())), max(apart, float(found.apart.max()))
        ties += found.ties
        leaking += int(((found.crossing > 0) | (found.apart > mixer.bound)).sum())
    caught = {}
    for name, fault in mixer.faults.items():
        sequences = [each for each in lengths(rng, 3 * FAULTY) if len(each) > 1][:FAULTY]
        found = look(mixer, batch_of(sequences, rng), rng, fault)
        caught[name] = [int(((found.crossing > 0) | (found.apart > mixer.bound)).sum()), len(sequences)]
    found = {"documents": documents, "leaking": leaking, "crossing": crossing, "apart": apart, "ties": ties}
    return about(mixer, seed, began) | found | {"caught": caught}


def forward(mixer: Mixer, seed: int) -> Row:
    """Of one batch, forward: other documents' tokens are changed."""
    rng, largest, documents, began = np.random.default_rng(seed), 0.0, 0, time.process_time()
    moving = 0
    for sequences, width in packings(mixer, rng):
        found = moved(mixer, batch_of(sequences, rng, width), rng)
        documents += sum(map(len, sequences))
        largest, moving = max(largest, float(found.max())), moving + int((found > 0).sum())
    caught = {}
    for name, fault in mixer.crossing_faults.items():
        sequences = [each for each in lengths(rng, FAULTY) if len(each) > 1][: FAULTY // 4]
        caught[name] = [int((moved(mixer, batch_of(sequences, rng), rng, fault) > 0).sum()), len(sequences)]
    found = {"forward": True, "documents": documents, "leaking": moving, "moved": largest}
    return about(mixer, seed, began) | found | {"caught": caught}


def row(mixer: Mixer, both: Sequence[Row]) -> list[str]:
    changed, mine = [b for b in both if "moved" in b], [b for b in both if "moved" not in b]
    caught = "; ".join(
        f"{name} {sum(b['caught'].get(name, [0, 0])[0] for b in both)} of "
        f"{sum(b['caught'].get(name, [0, 0])[1] for b in both)}"
        for name in mixer.faults
    )
    crossing = [max((b["crossing"] for b in mine), default=None)]
    crossing = [max((b["moved"] for b in changed), default=None), *crossing] if mixer.gradients else [*crossing, None]
    counts = [changed, mine] if mixer.gradients else [mine, []]
    return [
        mixer.name,
        mixer.path,
        str(mixer.dtype).removeprefix("torch."),
        *(f"{sum(b['packings'] for b in each):,}" if each else "–" for each in counts),
        f"{sum(b['documents'] for b in both):,}",
        str(sum(b["leaking"] for b in both)),
        *("–" if each is None else str(each) for each in crossing),
        f"{max((b['apart'] for b in mine), default=float('nan')):.1e} (≤ {mixer.bound:g})",
        caught,
    ]


ABOUT = """\
# Leakage between documents

Command: `python benchmarks/leakage.py --packings {packings}` (`make leakage`)  
Hardware: {cpu}; {seconds:.0f} s of one core  
Measured: {when}  
Each batch: [leakage.jsonl](leakage.jsonl)

A packing is a sequence of 40 tokens with one to nine documents of 1 to 40 tokens, with or without padding; tiny random
models. Of each batch of packings some documents are asked, and the gradient of what the last layer says of them (in
drawn directions) must be exactly zero at every other document's embeddings. Forward, in other packings, every token of
the documents that are not asked is changed, and no bit may move. FlexAttention has no gradient on a CPU; it runs
uncompiled, so this is of its mask, not of its kernel. With the gradients (FlexAttention: with the change), every
document is also compared with itself alone, in a batch of documents of its length without padding (in FlexAttention's
sequences: with SDPA's). Mixtures of experts run in fp32, where torch multiplies groups of rows, and transformers
normalises in fp32. A document that differs and has a token whose experts are chosen by a margin of at most {tie:g} is
left out of the differences, not of what crosses: rounding chooses there. Such documents: {ties}.

Where 2 or 4 ranks are named, they divide each sequence (context parallelism, on gloo), and half of the packings are 37
tokens wide, to which the ranks add padding. The gradient is gathered from the ranks; a document alone is computed by
one process. Some mixers have two key-value heads, which 4 ranks share.

Faults are put in on purpose into sequences of two and more documents: the mask's borders off by one, positions that are
not reset (transformers counts itself, and linear attention refuses them, so they have none of these), sequences shifted
against their documents. Linear attention also: a state that goes on from document to document, and a convolution that
reads the tokens before a document, each alone, beside softmax layers that separate the documents. On ranks also: the
backend of a rank knows the documents of its own part only. Caught is a sequence where something crosses or differs
beyond the bound: of 1,000 with the gradients, and forward, where wrong positions show nothing, of 250.

"""
NAMES = (
    "mixer | backend | precision | packings: forward | backward | documents | leak | largest crossing: forward | "
    "backward | largest difference from alone (bound) | faults caught"
)


def page(found: Sequence[Row], place: Path, packings: int) -> int:
    """Write the page; return 1 where something crossed, differed or was missed."""
    of = {mixer: [b for b in found if (b["mixer"], b["path"]) == (mixer.name, mixer.path)] for mixer in ALL}
    about = ABOUT.format(
        packings=packings,
        cpu=cpu(),
        seconds=sum(b["cpu_s"] for b in found),
        when="; ".join(dict.fromkeys(f"{b['date']}, commit {b['commit']}" for b in found)),
        tie=TIE,
        ties=sum(b.get("ties", 0) for b in found),
    )
    wrong = [
        f"{b['mixer']} {b['path']}"
        for b in found
        if b["leaking"] or any(seen < there for seen, there in b["caught"].values())
    ]
    return write_page(place, about, [table(NAMES, [row(mixer, both) for mixer, both in of.items() if both])], wrong)


def missing(ledger: Path, mixers: Sequence[Mixer], packings: int) -> list[Wanted]:
    """The batches that the ledger does not have."""
    done = {(b["mixer"], b["path"], b["seed"], "moved" in b) for b in kept(ledger)}
    return [
        (mixer, seed, ahead)
        for seed in range(-(-packings // BATCH))
        for mixer in mixers
        for ahead in ((True, False) if mixer.gradients else (False,))
        if (mixer.name, mixer.path, seed, ahead) not in done
    ]


def make(ledger: Path, mixers: Sequence[Mixer], packings: int, ends: float, of: str) -> None:
    """Make the batches that the ledger does not have until the time is over; all ranks together."""
    for mixer, seed, ahead in missing(ledger, mixers, packings):
        if summed(time.monotonic() > ends):
            return
        row = (forward if ahead else measured)(mixer, seed)
        row |= {"cpu_s": round(summed(row["cpu_s"]), 1), "date": today(), "commit": of}
        if not dist.is_initialized() or not dist.get_rank():
            keep(ledger, row)
            print(json.dumps(row), flush=True)


def summed(value: float) -> float:
    """Over the ranks, if this is one of several."""
    total = torch.tensor(float(value))
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def main() -> int:
    asked = options(
        __doc__,
        packings=(10_000, "of each mixer and backend"),
        models=(sorted({mixer.model_type for mixer in ALL}), "only mixers of these families"),
        context=([*SIZES], "how many ranks divide a sequence"),
        minutes=float("inf"),
        results=RESULTS,
    )
    ledger, ends = asked.results.with_suffix(".jsonl"), time.monotonic() + 60 * asked.minutes
    left = 0
    for ranks in asked.context:
        mixers = [mixer for mixer in SIZES[ranks] if mixer.model_type in asked.models]
        task = partial(make, ledger, mixers, asked.packings, ends, commit())
        if ranks == 1:
            task()
        elif missing(ledger, mixers, asked.packings):
            with tempfile.TemporaryDirectory() as directory:
                on_processes(ranks, task, Path(directory))
        left += len(missing(ledger, mixers, asked.packings))
    print(f"{left} of the batches asked for are missing")
    return page(kept(ledger), asked.results, asked.packings)


if __name__ == "__main__":
    sys.exit(main())
