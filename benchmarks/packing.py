"""Packing on the fly beside TRL's (bfd) and next-fit, in one interleaved run: how full the sequences are, documents a
second of one core, how long a document waits, and how evenly sequences share the work of attention.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/packing.py [--documents 100000] [--rounds 3]

Three mixes of lengths at a width of 4,096: log-normal (median 180, p99 about 2,000), bimodal (chats of about 150 beside
articles of about 1,900) and heavy-tailed (Pareto); and long chains of thought (log-normal, median 6,000) at 16,384. ptf
packs as a run does, with a window of `--lookahead` documents, and lays the sequences out as tensors, as a run's loader
does. TRL is measured twice: as SFTTrainer calls it, 1,000 documents at a time, and given all documents at once;
next-fit sees one after the other. Prints a JSON line a round and writes results/packing.md.
"""

import json
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from commands import PEER, last_line, need_peer, options
from flow_runs import cpu, results_page
from pages import head, spread, table, write_page

WIDTHS = {"log-normal": 4096, "bimodal": 4096, "heavy tail": 4096, "long thoughts": 16384}
SEQUENCES = 8
LOOKAHEADS = (64, 128, 256, 512)
TRL_SFT = 1000  # documents that SFTTrainer packs at a time: it leaves Dataset.map its default


def mixes(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    chat = rng.random(count) < 0.7
    made = {
        "log-normal": rng.lognormal(np.log(180), 1.03, count),
        "bimodal": np.where(chat, rng.normal(150, 60, count), rng.normal(1900, 500, count)),
        "heavy tail": 60 * (1 + rng.pareto(1.1, count)),
        "long thoughts": rng.lognormal(np.log(6000), 0.6, count // 4),
    }
    return {name: np.clip(lengths, 8, WIDTHS[name]).astype(int) for name, lengths in made.items()}


def ours(lengths: np.ndarray, width: int, lookahead: int) -> tuple[dict[str, float], list[list[int]]]:
    """Fill, documents a second of packing alone and with sequences laid out, the longest wait in sequences,
    and the sequences by numbers of their documents."""
    from ptf.data.batch import lay_out
    from ptf.data.document import Document
    from ptf.data.packing import Packer

    tokens = np.arange(width, dtype=np.int32) % 1000
    weights = (np.arange(width) % 3 > 0).astype(np.float32)
    samples = [(Document(tokens[:n], weights[:n]),) for n in lengths]
    number = {id(unit): i for i, unit in enumerate(samples)}
    began = time.process_time()
    sequences = list(Packer(iter(samples), width, lookahead))
    packed = time.process_time()
    for at in range(0, len(sequences), SEQUENCES):
        lay_out(sequences[at : at + SEQUENCES], width, SEQUENCES)
    done = time.process_time()
    names = [[number[id(unit)] for unit in sequence] for sequence in sequences]
    fill = fill_of([[int(lengths[i]) for i in sequence] for sequence in names], width, lookahead)
    own = np.zeros(len(lengths), int)
    for r, sequence in enumerate(names):
        own[sequence] = r
    # the sequence that let it in
    sight = np.searchsorted(
        np.cumsum([len(sequence) for sequence in names]) + lookahead, np.arange(len(lengths)), side="right"
    )
    waits = own - sight
    bias = float(np.corrcoef(lengths, waits)[0, 1])
    rates = {
        "packed_s": len(lengths) / (packed - began),
        "laid_out_s": len(lengths) / (done - began),
        "packing": (packed - began) / (done - began),
        "token_s": float(lengths.sum()) / (done - began),
    }
    return {"fill": fill, **rates, "waited": int(waits.max()), "bias": bias}, names


def fill_of(sequences: list[list[int]], width: int, lookahead: int) -> float:
    """How full sequences are, given by the lengths in each; an endless stream never drains its window."""
    whole = sequences[: max(1, len(sequences) - lookahead)]
    return sum(map(sum, whole)) / (width * len(whole))


def by_lookahead(lengths: np.ndarray, width: int) -> list[str]:
    """Fill and documents a second of packing the lengths alone, for each look-ahead."""
    from ptf.data.document import length
    from ptf.data.packing import Packer
    from ptf.data.token_file import placeholder_unit

    cells, units = [], [placeholder_unit(n) for n in lengths.tolist()]
    for lookahead in LOOKAHEADS:
        began = time.process_time()
        packed = list(Packer(iter(units), width, lookahead))
        rate = len(lengths) / (time.process_time() - began)
        sequences = [[length(unit) for unit in sequence] for sequence in packed]
        cells.append(f"{fill_of(sequences, width, lookahead):.4f} ({rate / 1e3:,.0f} k/s)")
    return cells


def next_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    sequences: list[list[int]] = [[]]
    room = width
    for i, n in enumerate(lengths.tolist()):
        if n > room:
            sequences.append([])
            room = width
        sequences[-1].append(i)
        room -= n
    return sequences


def imbalance(
    lengths: np.ndarray,
    sequences: list[list[int]],
    ranks: int,
    each: int,
    deal: Callable[[Any, int], Any],
) -> float:
    """Largest over mean of the ranks' Σ length², median over steps."""
    work = np.array([float((lengths[sequence] ** 2).sum()) for sequence in sequences])
    step = ranks * each
    found = []
    for at in range(0, len(work) - step + 1, step):
        sums = [work[at : at + step][share].sum() for share in deal(work[at : at + step], ranks)]
        found.append(max(sums) / np.mean(sums) - 1)
    return float(np.median(found))


def in_turn(work: np.ndarray, ranks: int) -> list[np.ndarray]:
    return [np.arange(rank, len(work), ranks) for rank in range(ranks)]


def trl(directory: str, name: str, at_once: int) -> dict[str, float]:
    command = [str(PEER), "benchmarks/peers/trl_packing.py", f"{directory}/{name}.npy", str(WIDTHS[name]), str(at_once)]
    return last_line(command, "TRL", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH="")


def main() -> None:
    asked = options(__doc__, documents=100_000, lookahead=(None, "default: that of a config"), rounds=3)
    need_peer()
    from ptf.config.sections.data import LONG_SEQUENCE, LOOKAHEAD, LOOKAHEAD_OF_LONG
    from ptf.data.packing import balanced

    lines, balance, fills, spent = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for name, lengths in mixes(asked.documents).items():
            np.save(f"{directory}/{name}.npy", lengths)
            width = WIDTHS[name]
            lookahead = asked.lookahead or (LOOKAHEAD_OF_LONG if width >= LONG_SEQUENCE else LOOKAHEAD)
            fills.append([name, f"{width:,}", *by_lookahead(lengths, width)])
            found: dict[str, list[dict[str, Any]]] = {"ptf": [], "TRL": [], "TRL, all at once": [], "next-fit": []}
            sequences: list[list[int]] = []
            for _ in range(asked.rounds):
                one, sequences = ours(lengths, width, lookahead)
                found["ptf"].append(one)
                found["TRL"].append(trl(directory, name, TRL_SFT))
                found["TRL, all at once"].append(trl(directory, name, len(lengths)))
                began = time.process_time()
                simple = next_fit(lengths, width)
                rate = len(lengths) / (time.process_time() - began)
                found["next-fit"].append({"fill": lengths.sum() / (width * len(simple)), "packed_s": rate})
                for system, each in found.items():
                    print(json.dumps({"mix": name, "system": system, **each[-1]}), flush=True)
            middle = {s: {k: median(r[k] for r in each) for k in each[0]} for s, each in found.items()}
            ptf, laid_out = middle.pop("ptf"), spread([r["laid_out_s"] for r in found["ptf"]])
            cells = [f"{ptf['fill']:.4f}", f"{ptf['packed_s']:,.0f}", laid_out]
            cells += [f"{ptf['waited']:.0f}", f"{ptf['bias']:+.3f}"]
            for theirs in middle.values():
                cells += [f"{theirs['fill']:.4f}", f"{theirs['packed_s']:,.0f}"]
            lines.append([name, *cells, cpu()])
            parts = [ptf["packing"], 1 - ptf["packing"]]
            shares = [f"{part:.0%}" for part in parts]
            spent.append([name, f"{lengths.mean():,.0f}", *shares, f"{ptf['token_s'] / 1e6:,.0f}"])
            cells = [
                imbalance(lengths, sequences, r, e, deal) for r, e in ((8, 8), (2, 2)) for deal in (in_turn, balanced)
            ]
            balance.append([name, *(f"{cell:.1%}" for cell in cells)])
    about = f"""\
{asked.documents:,} documents a mix in sequences of 4,096, and a quarter of that, long chains of thought, in sequences
of 16,384; ptf sees {asked.lookahead or "64 (of long chains of thought 256)"} documents at a time, TRL (bfd; versions
in `benchmarks/requirements-peers.txt`) {TRL_SFT:,}, as SFTTrainer calls it, and all of them at once, next-fit one
after the other; {asked.rounds} rounds in turn, medians. Rates are documents per CPU-second; *packed*: ptf has put
documents together, TRL has also written their tokens into Arrow; *laid out* includes the loader's `lay_out` (tokens,
targets, positions, segments, weights). ptf's fill leaves out as many of the last sequences as it sees documents, for
a stream has no end; TRL's and next-fit's are of all. *Waited*: the most sequences that left between a document's
coming into sight and its own. *Bias*: correlation of length and wait.

"""
    names = (
        "mix | ptf: fill | packed /s | and laid out /s (range) | waited | bias | TRL: fill | packed /s | TRL, all at "
        "once: fill | packed /s | next-fit: fill | packed /s | CPU"
    )
    tables = [
        table(names, lines),
        OF_TIME,
        table("mix | tokens a document | packing | laying out | million tokens /s", spent),
        OF_BALANCE,
        table("mix | 8 ranks × 8 sequences, in turn | balanced | 2 × 2, in turn | balanced", balance),
        "\nFill by look-ahead, and documents per CPU-second of packing lengths alone, measured once.\n",
        table(["mix", "width", *map(str, LOOKAHEADS)], fills),
    ]
    write_page(results_page("packing.md"), head("Packing on the fly", ", one thread") + about, tables)


OF_TIME = """
Where the time of *laid out* goes: packing; laying out 36 bytes
a token.
"""
OF_BALANCE = """
Work of attention, Σ length² of a rank's sequences: how far the largest is above the mean, median over steps. *In turn*:
sequence j goes to rank j mod W, which made it. *Balanced*: equally many sequences each, dealt by work, as the loader of
every run does (ptf/data/rank_balancing.py, groups of at most 16 ranks), and rollouts.
"""


if __name__ == "__main__":
    main()
