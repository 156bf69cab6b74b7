"""What reading tokenized data costs, with its page.

    python benchmarks/loader_cost.py [--documents 400000]

Writes a tokenized data set of that many documents (log-normal lengths, mean about 298 tokens, ids without a pattern)
and measures, with the defaults of `data.shuffle_buffer` and of the look-ahead: what is read before the first
sequence at 8, 64 and 512 partitions that one rank serves; documents per CPU-second from the files to batches (reading,
decompressing, order, shuffling, packing, states and laying out, all in one thread; the SHA-256 of the files, which is
compared once before, is not in it), and by stage; memory and the size of a partition's state; and how a set that is
sorted by a binary label is mixed.
"""

import gc
import os
import pickle
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from commands import options
from flow_runs import results_page
from pages import head, table, write_page

from ptf import storage
from ptf.data import encode, encoded, loader, mixture, order, packing, token_file, tokenized
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.document import Document
from ptf.data.loader import Loader
from ptf.data.partitions import Partitions
from ptf.data.sources import columnar
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import ROWS_IN_GROUP, RowFile, unit_columns
from ptf.data.tokenizer import Tokenizer
from tests.data.test_order import labelled, labels, mixed, partitions_of

AIM, EPOCHS = 20_000, 8
MEAN, SEQ_LEN, SHUFFLE, LOOKAHEAD, ROWS_A_RANK = 298, 2048, 1024, 64, 4


def write_data(directory: Path, documents: int, tokenizer: Tokenizer) -> float:
    """The data set; its mean length."""
    rng, total = np.random.default_rng(0), 0
    directory.mkdir()
    file = RowFile(directory / "rows.parquet")
    for _ in range(0, documents, ROWS_IN_GROUP):
        rows = []
        for n in np.clip(rng.lognormal(np.log(MEAN) - 0.3, 0.8, ROWS_IN_GROUP), 8, SEQ_LEN).astype(int):
            weights = np.ones(n, np.float32)
            weights[: n // 3] = 0.0
            rows.append(unit_columns([(Document(rng.integers(0, 150_000, n).astype(np.int32), weights, "a"),)]))
            total += int(n)
        file.write(rows)
    file.close()
    storage.commit(directory, tokenized.made_by(tokenizer))
    return total / (-(-documents // ROWS_IN_GROUP) * ROWS_IN_GROUP)


def made(directory: Path, tokenizer: Tokenizer, partitions: int, epochs: int | None = None) -> Partitions:
    source = SourceSpec(str(directory), kind="tokenized", epochs=epochs)
    return Partitions(
        {"a": source},
        tokenizer,
        None,  # type: ignore[arg-type]
        partitions=partitions,
        seed=0,
        shuffle=SHUFFLE,
        seq_len=SEQ_LEN,
        lookahead=LOOKAHEAD,
    )


def first_sequence(partitions: Partitions) -> tuple[int, float, float]:
    """Row groups that are read until every partition has given a sequence, those a partition,
    and seconds of CPU until the first partition has."""
    began = time.process_time()
    next(partitions(0))
    first = time.process_time() - began
    for partition in range(1, partitions.partitions):
        next(partitions(partition))
    reads = partitions.opened("a")[0].reader.reads
    return reads, reads / partitions.partitions, first


def documents_a_second(directory: Path, tokenizer: Tokenizer, documents: int, epochs: int = 2) -> list[float]:
    """From the files to batches on one rank, in each epoch; in the first most of the memory is touched for the first
    time, and what is loaded when it is needed is loaded. Garbage of the imports and of writing the data is collected
    before."""
    reader = Loader(
        made(directory, tokenizer, 8, epochs=epochs),
        partitions=8,
        sequences=32,
        micro_batch_sequences=8,
        seq_len=SEQ_LEN,
    )
    rates, steps = [], reader._steps(0, threading.Event())
    gc.collect()
    for _ in range(epochs):
        began, found = time.process_time(), 0
        while found < 0.95 * documents:
            found += sum(len(batch.lengths) for batch in next(steps).batches)
        rates.append(found / (time.process_time() - began))
    return rates


STAGES = {
    "parquet: read and decompress a row group": [(columnar.NumberedBlocks, "block")],
    "its columns as arrays": [(token_file.TokenRows, "__init__")],
    "order of the rows": [(order.KnownRows, "__next__")],
    "samples of a row, and counts": [(encode.Encoder, "__call__")],
    "their places": [(encoded.Encoded, "_read")],
    "mixture": [(mixture.Mixer, "__next__")],
    "packing": [(packing.Packer, "__next__")],
    "states of the partitions": [(Loader, "_snapshot")],
    "laying out": [(loader, "lay_out")],
}


def stages(directory: Path, tokenizer: Tokenizer, documents: int) -> dict[str, float]:
    """Microseconds of CPU a document, of each stage without those inside it, over both epochs;
    the timers themselves cost something, too."""
    spent, open_stages = dict.fromkeys(STAGES, 0.0), [0.0]

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            open_stages.append(0.0)
            try:
                return function(*given, **named)
            finally:
                took = time.thread_time() - began
                spent[stage] += took - open_stages.pop()
                open_stages[-1] += took

        return run

    with ExitStack() as stack:
        for stage, places in STAGES.items():
            for place, name in places:
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, timed(stage, getattr(place, name)))
        documents_a_second(directory, tokenizer, documents)
    return {stage: seconds / (2 * 0.95 * documents) * 1e6 for stage, seconds in spent.items()}


def state_bytes(directory: Path, tokenizer: Tokenizer) -> int:
    partition = made(directory, tokenizer, 8)(0)
    for _ in range(20):
        next(partition)
    return len(pickle.dumps(partition.state_dict()))


def main() -> None:
    given = options(__doc__, documents=400_000)
    with tempfile.TemporaryDirectory() as scratch:
        data, tokenizer = Path(scratch) / "data", character_tokenizer("abc", Path(scratch) / "tokenizer")
        mean = write_data(data, given.documents, tokenizer)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first, *later = documents_a_second(data, tokenizer, given.documents, 1 + EPOCHS)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        parts, state = stages(data, tokenizer, given.documents), state_bytes(data, tokenizer)
        size = (data / "rows.parquet").stat().st_size / given.documents
        sorted_set = labelled(Path(scratch), 100_000, 100)
        shares = {partitions: mixed(labels(partitions_of(sorted_set, partitions)), 1000) for partitions in (1, 8, 512)}
        firsts = {partitions: first_sequence(made(data, tokenizer, partitions)) for partitions in (8, 64, 512)}
    about = f"""\
{given.documents:,} tokenized documents of {mean:.0f} tokens on the average, in row groups of {ROWS_IN_GROUP:,}, packed
into sequences of {SEQ_LEN:,} tokens; `data.shuffle_buffer: {SHUFFLE}`, a look-ahead of {LOOKAHEAD} samples. Times are
CPU time of the process, the machine's load average being {os.getloadavg()[1]:.0f}.

"""
    later_s = f"{median(later):,.0f} ({min(later):,.0f} to {max(later):,.0f})"
    found = {
        "documents per CPU-second, files to batches, first epoch": f"{first:,.0f}",
        f"the same, in each of {EPOCHS} epochs after it: median (least to most)": later_s,
        "bytes of file a document, of ids without a pattern": f"{size:,.0f}",
        "memory that it adds (peak, 8 partitions)": f"{memory:,.0f} MiB",
        "state of a partition": f"{state / 1024:.1f} KiB",
    }
    tables = [
        table(
            "partitions, all of one rank | row groups read before every partition has a sequence | a partition | "
            "CPU-seconds to the first sequence",
            [(n, f"{reads:,}", f"{each:.2f}", f"{spent:.2f}") for n, (reads, each, spent) in firsts.items()],
        ),
        "",
        table("what | found", found.items()),
        f"\nThe aim is {AIM:,} documents per CPU-second: {'reached' if median(later) >= AIM else 'not reached here'}. "
        "The first epoch touches\nits memory for the first time. By stage, over two epochs, with the timers' cost:\n",
        table("of a document | CPU, µs", [(stage, f"{spent:.2f}") for stage, spent in parts.items()]),
        "\n100,000 rows sorted by a binary label in 100 row groups: in how many of all windows of 1,000 consecutive "
        "samples the\nlabel's share is 0.3 to 0.7\n",
        table("partitions | windows", [(partitions, f"{share:.1%}") for partitions, share in shares.items()]),
    ]
    write_page(results_page("loader_cost.md"), head("What the loader costs") + about, tables)


if __name__ == "__main__":
    main()
