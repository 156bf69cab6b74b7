"""CPU-seconds that a rank's loader spends on a step at 1, 8 and 128 ranks, with their page.

    python benchmarks/loader_ranks.py [--documents 40000] [--steps 1400] [--rounds 1]

A rank is a process, as in training, and what counts is all CPU time of that process, messages included. Ranks have as
many partitions and as many documents each however many there are. Of 128 ranks one group that exchanges sequences is
run: the others say nothing to it. Sixteen processes run side by side in every case (16 single ranks, two groups of 8,
one of 16), since processes that share cores and caches slow each other down; cases take turns.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from flow_runs import ROOT, cpu
from loader_cost import write

from ptf import storage
from ptf.compute.peers import ProcessPeers
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.loader import Loader
from ptf.data.partitions import Partitions
from ptf.data.rank_balancing import GROUP, Peers, group_size
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenized import made_by
from ptf.data.tokenizer import Tokenizer

RESULTS = ROOT / "benchmarks" / "results" / "loader_ranks.md"
RANKS = 1, 8, 128
PARTITIONS_A_RANK, SEQUENCES_A_RANK, SEQ_LEN, SHUFFLE, LOOKAHEAD = 8, 4, 2048, 1024, 64


class Timed:
    """Peers, and the CPU time that the loader's thread spends in them."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self.rank, self.size, self.spent, self.sent = peers, peers.rank, peers.size, 0.0, 0

    def all_gather(self, value: bytes) -> list[bytes]:
        began = time.thread_time()
        found = self._peers.all_gather(value)
        self.spent += time.thread_time() - began
        return found

    def all_to_all(self, values: Sequence[bytes]) -> list[bytes]:
        began = time.thread_time()
        found = self._peers.all_to_all(values)
        self.spent, self.sent = self.spent + time.thread_time() - began, self.sent + sum(map(len, values))
        return found


def repeated(directory: Path, ranks: int, tokenizer: Tokenizer) -> Path:
    """A data set that has the documents of `directory` once for every rank: links to its files."""
    found = directory.with_name(f"{directory.name}-{ranks}")
    if not found.exists():
        found.mkdir()
        for rank in range(ranks):
            for file in directory.glob("*.parquet"):
                os.link(file, found / f"{rank:03}-{file.name}")
        storage.commit(found, made_by(tokenizer))
    return found


def rank_of_group(
    data: Path, tokenizer: Tokenizer, rank: int, ranks: int, meeting: Path, steps: int
) -> dict[str, float]:
    """One rank, in this process: CPU-seconds of a step, of making its sequences and of messages; bytes; documents."""
    size, peers = group_size(ranks), None
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=300)
        )
        assert dist.group.WORLD is not None
        peers = Timed(ProcessPeers(dist.group.WORLD))
    partitions, source = PARTITIONS_A_RANK * ranks, SourceSpec(str(data), kind="tokenized", epochs=1)
    made = Partitions(
        {"a": source},
        tokenizer,
        None,
        partitions=partitions,
        seed=0,
        shuffle=SHUFFLE,
        seq_len=SEQ_LEN,
        lookahead=LOOKAHEAD,
    )  # type: ignore[arg-type]
    loader = Loader(
        made,
        partitions=partitions,
        sequences=SEQUENCES_A_RANK * ranks,
        rank=rank,
        world_size=ranks,
        micro_batch_sequences=SEQUENCES_A_RANK,
        seq_len=SEQ_LEN,
        peers=peers,
    )
    making, real = [0.0], loader._read

    def made_in(step: int) -> Any:
        began = time.thread_time()
        found = real(step)
        making[0] += time.thread_time() - began
        return found

    loader._read = made_in
    began, documents = time.process_time(), 0
    for _ in range(steps):
        documents += sum(len(batch.lengths) for batch in next(loader))
    spent = time.process_time() - began
    told, sent = (peers.spent, peers.sent) if peers else (0.0, 0)
    each = {"step": spent, "making": making[0], "messages": told, "bytes": float(sent), "documents": float(documents)}
    return {key: value / steps for key, value in each.items()}


def _child(out: Any, *arguments: Any) -> None:
    out.send(rank_of_group(*arguments))
    out.close()
    os._exit(0)  # without a word to peers that may have ended


def decoding(directory: Path, tokenizer: Tokenizer, ranks: int, steps: int) -> dict[str, float]:
    """The median over as many processes as a group has at most: single ranks, or as many groups of them."""
    data, forked = repeated(directory, ranks, tokenizer), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        children, ends = [], []
        for i in range(GROUP // group_size(ranks) * group_size(ranks)):
            group, rank = divmod(i, group_size(ranks))
            end, out = forked.Pipe(duplex=False)
            meeting = Path(scratch) / f"meeting{group}"
            children.append(
                forked.Process(target=_child, args=(out, data, tokenizer, rank, ranks, meeting, steps), daemon=True)
            )
            children[-1].start()
            out.close()
            ends.append(end)
        found = [end.recv() for end in ends]
        for child in children:
            child.join()
    return {key: median(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in RANKS}
    with tempfile.TemporaryDirectory() as scratch:
        data, tokenizer = Path(scratch) / "data", character_tokenizer("abc", Path(scratch) / "tokenizer")
        mean = write(data, given.documents, tokenizer)
        for _ in range(given.rounds):
            for n in RANKS:
                rounds[n].append(decoding(data, tokenizer, n, given.steps))
                print(n, rounds[n][-1], flush=True)
    found = {n: {key: median(one[key] for one in each) for key in each[0]} for n, each in rounds.items()}
    alone = found[1]

    def row(n, one):
        return (
            f"| {n} | {one['making'] * 1e3:.2f} ({one['making'] / alone['making']:.2f}×) "
            f"| {one['messages'] * 1e3:.2f} | {one['step'] * 1e3:.2f} "
            f"({one['step'] / alone['step']:.2f}×) | {one['bytes'] / 1024:.0f} KiB | {one['documents']:.1f} |"
        )

    lines = [
        "# What a rank's loader costs, by ranks",
        "",
        f"Command: `{' '.join(['python', 'benchmarks/loader_ranks.py', *sys.argv[1:]])}`  ",
        f"Hardware: {cpu()}  ",
        f"Date: {time.strftime('%Y-%m-%d')}",
        "",
        (
            f"A step has {SEQUENCES_A_RANK} sequences of {SEQ_LEN:,} tokens a rank. "
            f"Every rank has {PARTITIONS_A_RANK} partitions and {given.documents:,} tokenized documents"
        ),
        (
            f"of {mean:.0f} tokens on the average (links to one file), `data.shuffle_buffer: {SHUFFLE}`, "
            f"`data.packing_lookahead: {LOOKAHEAD}`, and makes {given.steps:,}"
        ),
        (
            "steps of an epoch, the filling of its windows included. A rank is a process, "
            "and ranks exchange sequences over gloo; milliseconds are CPU time of"
        ),
        (
            "the whole process, its message threads too, the median over 16 processes that run side by side (16 "
            "single ranks; two groups of 8; the first"
        ),
        (
            f"group of 16 of 128 ranks), and over {given.rounds} rounds in which the cases take turns. "
            "*Making* is reading, shuffling, mixing and packing"
        ),
        (
            "the rank's own partitions; *messages* is what the loader's thread spends in them; "
            "the rest is dealing out sequences, writing and reading those that"
        ),
        "change rank, and laying out batches.",
        "",
        "| ranks | making, ms a step | messages | all, ms a step | sent in a step | documents |",
        "|---|---|---|---|---|---|",
        *(row(n, one) for n, one in found.items()),
        "",
    ]
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
