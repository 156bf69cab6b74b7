"""Packing on the fly beside TRL's (bfd) and next-fit, in one interleaved run: how full the sequences are, documents a
second of one core, how long a document waits, and how evenly sequences share the work of attention.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/packing.py [--documents 100000] [--rounds 3]

Three mixes of lengths at a width of 4,096: log-normal (median 180, p99 about 2,000), bimodal (chats of about 150 beside
articles of about 1,900) and heavy-tailed (Pareto); and long chains of thought (log-normal, median 6,000) at 16,384. ptf
packs as a run does, with a window of `--lookahead` documents, and lays the sequences out as tensors in memory that is
used again, as a run's loader does. TRL is measured twice: as SFTTrainer calls it, 1,000 documents at a time, and given
all documents at once; next-fit sees one after the other. Prints a JSON line a round and writes
results/packing.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu

RESULTS = ROOT / "benchmarks" / "results" / "packing.md"
PEER = ROOT / ".venv-peers" / "bin" / "python"
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
    from ptf.data.batch import Memory, lay_out
    from ptf.data.documents import Documents
    from ptf.data.packing import Packer
    from ptf.data.sample import Sample

    tokens = np.arange(width, dtype=np.int32) % 1000
    weights = (np.arange(width) % 3 > 0).astype(np.float32)
    samples = [(Sample(tokens[:n], weights[:n]),) for n in lengths]
    number = {id(unit): i for i, unit in enumerate(samples)}
    began = time.process_time()
    sequences = list(Packer(iter(samples), width, lookahead))
    packed = time.process_time()
    memory, gathering = Memory(), 0.0
    for at in range(0, len(sequences), SEQUENCES):
        start = time.process_time()
        documents = Documents.of(sequences[at : at + SEQUENCES])
        gathering += time.process_time() - start
        lay_out(documents, width, SEQUENCES, memory)
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
        "gathering": gathering / (done - began),
        "token_s": float(lengths.sum()) / (done - began),
    }
    return {"fill": fill, **rates, "waited": int(waits.max()), "bias": bias}, names


def fill_of(sequences: list[list[int]], width: int, lookahead: int) -> float:
    """How full sequences are, given by the lengths in each; an endless stream never drains its window."""
    whole = sequences[: max(1, len(sequences) - lookahead)]
    return sum(map(sum, whole)) / (width * len(whole))


def by_lookahead(lengths: np.ndarray, width: int) -> list[str]:
    """Fill and documents a second of packing the lengths alone, for each look-ahead."""
    from ptf.data.packing import Packer

    cells = []
    for lookahead in LOOKAHEADS:
        began = time.process_time()
        sequences = list(Packer(iter(lengths.tolist()), width, lookahead, size=int))
        rate = len(lengths) / (time.process_time() - began)
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
    deal: Callable[[np.ndarray, int], list[np.ndarray]],
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
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [str(PEER), "benchmarks/peers/trl_packing.py", f"{directory}/{name}.npy", str(WIDTHS[name]), str(at_once)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--lookahead", type=int, help="default: that of a config")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/packing.py needs the peer's environment: make peers")
    from ptf.config.sections.data import LONG_SEQUENCE, LOOKAHEAD, LOOKAHEAD_OF_LONG
    from ptf.data.packing import balanced

    lines, balance, fills, spent = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for name, lengths in mixes(asked.documents).items():
            np.save(f"{directory}/{name}.npy", lengths)
            width = WIDTHS[name]
            lookahead = asked.lookahead or (LOOKAHEAD_OF_LONG if width >= LONG_SEQUENCE else LOOKAHEAD)
            fills.append(f"| {name} | {width:,} | {' | '.join(by_lookahead(lengths, width))} |")
            found: dict[str, list[dict[str, Any]]] = {"ptf": [], "TRL": [], "TRL, all at once": [], "next-fit": []}
            sequences: list[list[int]] = []
            for _ in range(asked.rounds):
                one, sequences = ours(lengths, width, lookahead)
                found["ptf"].append(one)
                found["TRL"].append(trl(directory, name, TRL_SFT))
                found["TRL, all at once"].append(trl(directory, name, len(lengths)))
                began = time.process_time()
                simple = next_fit(lengths, width)
                found["next-fit"].append(
                    {
                        "fill": lengths.sum() / (width * len(simple)),
                        "packed_s": len(lengths) / (time.process_time() - began),
                    }
                )
                for system, each in found.items():
                    print(json.dumps({"mix": name, "system": system, **each[-1]}), flush=True)
            middle = {s: {k: median(r[k] for r in each) for k in each[0]} for s, each in found.items()}
            spread = [r["laid_out_s"] for r in found["ptf"]]
            ptf = middle["ptf"]
            lines.append(
                f"| {name} | {ptf['fill']:.4f} | {ptf['packed_s']:,.0f} | {ptf['laid_out_s']:,.0f} "
                f"({min(spread):,.0f} – {max(spread):,.0f}) "
                f"| {ptf['waited']:.0f} | {ptf['bias']:+.3f} | {middle['TRL']['fill']:.4f} | "
                f"{middle['TRL']['packed_s']:,.0f} | {middle['TRL, all at once']['fill']:.4f} | "
                f"{middle['TRL, all at once']['packed_s']:,.0f} | {middle['next-fit']['fill']:.3f} | "
                f"{middle['next-fit']['packed_s']:,.0f} | {cpu()} |"
            )
            rest = 1 - ptf["packing"] - ptf["gathering"]
            spent.append(
                f"| {name} | {lengths.mean():,.0f} | {ptf['packing']:.0%} | {ptf['gathering']:.0%} | {rest:.0%} "
                f"| {ptf['token_s'] / 1e6:,.0f} |"
            )
            cells = [
                imbalance(lengths, sequences, r, e, deal) for r, e in ((8, 8), (2, 2)) for deal in (in_turn, balanced)
            ]
            balance.append(f"| {name} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")
    RESULTS.write_text(
        "# Packing on the fly\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/packing.py', *sys.argv[1:]])}`  \nHardware: {cpu()}, "
        f"one thread  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"{asked.documents:,} documents a mix in sequences of 4,096, and a quarter of that, long chains of thought, in "
        f"sequences of 16,384; ptf sees {asked.lookahead or '64 (of long chains of thought 256)'} documents "
        "at a time, "
        f"TRL (bfd; versions in `benchmarks/requirements-peers.txt`) {TRL_SFT:,}, as\n"
        "SFTTrainer calls it, and all of them at once, next-fit one after the other; "
        f"{asked.rounds} rounds in turn, medians. Rates are documents per CPU-second; "
        "*packed*: ptf has put documents together, TRL has\nalso written their tokens into Arrow; *laid out* includes "
        "the loader's `lay_out` (tokens, targets, positions, segments,\nweights). ptf's fill leaves out as many of the "
        "last sequences as it sees documents, for a stream has no end; TRL's and\nnext-fit's are of all. *Waited*: the "
        "most sequences that left between a document's coming into sight and its own. *Bias*: correlation of\n"
        "length and wait.\n\n"
        "| mix | ptf: fill | packed /s | and laid out /s (range) | waited | bias | TRL: fill | packed /s | TRL, all "
        "at once: fill | packed /s | next-fit: fill | packed /s | CPU |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        "Where the time of *laid out* goes: packing; gathering the documents' tokens and weights end to end; "
        "laying out 36 bytes a token.\n\n"
        "| mix | tokens a document | packing | gathering | laying out | million tokens /s |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(spent) + "\n\n"
        "Work of attention, Σ length² of a rank's sequences: how far the largest is above the mean, median over steps. "
        "*In turn*: sequence j goes to rank j mod W, which made it. *Balanced*: equally many sequences each, dealt by "
        "work, as the loader of\n"
        "every run does (ptf/data/rank_balancing.py, groups of at most 16 ranks), and rollouts.\n\n"
        "| mix | 8 ranks × 8 sequences, in turn | balanced | 2 × 2, in turn | balanced |\n|---|---|---|---|---|\n"
        + "\n".join(balance)
        + "\n\nFill by look-ahead, and documents per CPU-second of packing lengths alone, measured once.\n\n"
        f"| mix | width | {' | '.join(map(str, LOOKAHEADS))} |\n|---|---|{'---|' * len(LOOKAHEADS)}\n"
        + "\n".join(fills)
        + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
