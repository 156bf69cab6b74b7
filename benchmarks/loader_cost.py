"""What reading tokenized data costs, with its page.

    python benchmarks/loader_cost.py [--documents 100000]

Writes a tokenized data set of that many documents (log-normal lengths, mean about 298 tokens, ids without a pattern) and measures, with the defaults of
`data.shuffle` and `data.lookahead`: what is read before the first row at 8, 64 and 512 lanes that one rank serves; CPU-seconds a rank and step at 1, 8 and
128 ranks, which exchange rows in groups of 16 (one rank of each is measured, in this process; its peers are threads); documents a second from the files to
batches on one core; memory and the size of a lane's state; and how a set that is sorted by a binary label is mixed.
"""

import argparse
import pickle
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from flow_runs import ROOT, cpu

from ptf import storage
from ptf.data import tokenized
from ptf.data.exchange import GROUP, group_size
from ptf.data.loader import Loader
from ptf.data.pipeline import Lanes
from ptf.data.sample import Sample
from ptf.data.sources import SourceSpec
from ptf.data.stream import settle
from ptf.data.token_file import ROWS_IN_GROUP, RowFile, columns_of, side_by_side
from ptf.data.tokenizer import Tokenizer, character_tokenizer
from tests.data.peers import Threads, close
from tests.data.test_order import labelled, labels, lanes_of, mixed

RESULTS = ROOT / "benchmarks" / "results" / "loader_cost.md"
MEAN, SEQ_LEN, SHUFFLE, LOOKAHEAD, ROWS_A_RANK = 298, 2048, 1024, 64, 4


def write(directory: Path, documents: int, tokenizer: Tokenizer) -> float:
    """The data set; its mean length."""
    rng, total = np.random.default_rng(0), 0
    directory.mkdir()
    file = RowFile(directory / "rows.parquet")
    for _ in range(0, documents, ROWS_IN_GROUP):
        rows = []
        for n in np.clip(rng.lognormal(np.log(MEAN) - 0.3, 0.8, ROWS_IN_GROUP), 8, SEQ_LEN).astype(int):
            weights = np.ones(n, np.float32)
            weights[: n // 3] = 0.0
            rows.append(columns_of([(Sample(rng.integers(0, 150_000, n).astype(np.int32), weights, "a"),)]))
            total += int(n)
        file.write(side_by_side(rows))
    file.close()
    storage.commit(directory, tokenized.made_by(tokenizer))
    return total / (-(-documents // ROWS_IN_GROUP) * ROWS_IN_GROUP)


def made(directory: Path, tokenizer: Tokenizer, lanes: int, epochs: int | None = None) -> Lanes:
    source = SourceSpec(str(directory), kind="tokenized", epochs=epochs)
    return Lanes({"a": source}, tokenizer, None, lanes=lanes, seed=0, shuffle=SHUFFLE, seq_len=SEQ_LEN, lookahead=LOOKAHEAD)  # type: ignore[arg-type]


def first_row(lanes: Lanes) -> tuple[int, float, float]:
    """Row groups that are read until every lane has given a row, those a lane, and seconds of CPU until the first lane has."""
    began = time.process_time()
    next(lanes(0))
    first = time.process_time() - began
    for lane in range(1, lanes.lanes):
        next(lanes(lane))
    reads = lanes.opened("a")[0].reader.reads
    return reads, reads / lanes.lanes, first


def decoding(directory: Path, tokenizer: Tokenizer, ranks: int) -> float:
    """CPU-seconds that a rank spends on a step, on the average over an epoch of one group of the ranks."""
    size, lanes, peers = group_size(ranks), max(8, ranks), Threads.group(group_size(ranks))
    loaders = [
        Loader(
            made(directory, tokenizer, lanes, epochs=1), lanes=lanes, rows=ROWS_A_RANK * ranks, rank=rank, world_size=ranks, micro_rows=ROWS_A_RANK,
            seq_len=SEQ_LEN, peers=peers[rank],
        )
        for rank in range(size)
    ]  # fmt: skip
    began, steps, more = time.process_time(), 0, True
    with ThreadPoolExecutor(size) as pool:
        while more:
            batches = list(pool.map(next, loaders))
            more = any(float(batch.weights.sum()) for micro in batches for batch in micro)
            steps += more
    spent = time.process_time() - began
    close(loaders)
    return spent / steps / size


def documents_a_second(directory: Path, tokenizer: Tokenizer, documents: int) -> float:
    """From the files to batches, an epoch on one rank."""
    loader = Loader(made(directory, tokenizer, 8, epochs=1), lanes=8, rows=32, micro_rows=8, seq_len=SEQ_LEN)
    began, found, step = time.process_time(), 0, 0
    while found < 0.95 * documents:
        found += sum(len(batch.lengths) for batch in loader._pack(step).batches)
        step += 1
    return found / (time.process_time() - began)


def state_bytes(directory: Path, tokenizer: Tokenizer) -> int:
    lane = made(directory, tokenizer, 8)(0)
    for _ in range(20):
        next(lane)
    return len(pickle.dumps(settle(lane.state_dict())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, tokenizer = Path(scratch) / "data", character_tokenizer("abc", Path(scratch) / "tokenizer")
        mean = write(data, given.documents, tokenizer)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        speed = documents_a_second(data, tokenizer, given.documents)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        state = state_bytes(data, tokenizer)
        sorted_set = labelled(Path(scratch), 100_000, 100)
        shares = {lanes: mixed(labels(lanes_of(sorted_set, lanes)), 1000) for lanes in (1, 8, 512)}
        firsts = {lanes: first_row(made(data, tokenizer, lanes)) for lanes in (8, 64, 512)}
        ranks = {n: decoding(data, tokenizer, n) for n in (1, 8, 128)}
    lines = [
        "# What the loader costs", "",
        f"Command: `{' '.join(['python', 'benchmarks/loader_cost.py', *sys.argv[1:]])}`  ", f"Hardware: {cpu()}  ", f"Date: {time.strftime('%Y-%m-%d')}", "",
        f"{given.documents:,} tokenized documents of {mean:.0f} tokens on the average, in row groups of {ROWS_IN_GROUP:,},",
        f"packed into rows of {SEQ_LEN:,} tokens; `data.shuffle: {SHUFFLE}`, `data.lookahead: {LOOKAHEAD}`. Times are CPU time of the process, "
        "with other work beside it on the machine.", "",
        "| lanes, all of one rank | row groups read before every lane has a row | a lane | CPU-seconds to the first row |", "|---|---|---|---|",
        *(f"| {lanes} | {reads:,} | {each:.2f} | {spent:.2f} |" for lanes, (reads, each, spent) in firsts.items()), "",
        f"| ranks (groups of at most {GROUP}) | CPU-seconds a rank and step of {ROWS_A_RANK} rows a rank, exchange included |", "|---|---|",
        *(f"| {n} | {spent:.4f} |" for n, spent in ranks.items()), "",
        "| what | found |", "|---|---|",
        f"| documents a second, files to batches, one core, an epoch | {speed:,.0f} |",
        f"| memory that it adds (peak, 8 lanes) | {memory:,.0f} MiB |", f"| state of a lane | {state / 1024:.1f} KiB |", "",
        "100,000 rows sorted by a binary label in 100 row groups: in how many of all windows of 1,000 consecutive samples the label's share is 0.3 to 0.7", "",
        "| lanes | windows |", "|---|---|", *(f"| {lanes} | {share:.1%} |" for lanes, share in shares.items()), "",
    ]  # fmt: skip
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
