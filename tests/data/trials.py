"""Random trials of a run that is stopped and resumed: another number of ranks each time, any partitions, rows,
formats and mixtures.

Every sample carries its number, so what was trained can be read back from the batches, and compared with a run that
never stopped, with what an epoch is, and with what was said before the run began. Used by a test and by
benchmarks/resume_trials.py.
"""

import gzip
import itertools
import json
import pickle
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ptf import storage
from ptf.data import tokenized
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.loader import Loader
from ptf.data.order import PartitionSource
from ptf.data.partitions import Partitions
from ptf.data.sources import reader
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import RowFile, unit_columns
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan, planned
from tests.data.peers import Threads, close

BASE, SEQ_LEN, SOURCES = 1000, 128, "abc"
FORMATS = ("jsonl", "parquet", "jsonl.gz", "tokenized")


def encode(row: dict[str, Any], source: str) -> list[PackUnit]:
    """Documents that begin with the source and the number of the row, and which of its documents it is;
    of some rows none, of some several."""
    n = row["n"]
    made = []
    for i in range(0 if n % 11 == 5 else 1 + (n % 7 == 3)):
        tokens = np.full(4 + n % 37, n % 7, np.int32)
        tokens[:4] = SOURCES.index(source), n // BASE, n % BASE, i
        made.append((Document(tokens, np.ones(len(tokens), np.float32), source),))
    return made


@dataclass(frozen=True)
class Trial:
    sizes: dict[str, int]  # rows of each source
    formats: dict[str, str]
    weights: dict[str, float | None]
    partitions: int
    sequences: int  # in a step
    epochs: int | None
    mixture: dict[str, Any]
    shuffle: int
    limit: int | None
    worlds: list[int]
    steps: int  # between a stop and the next
    exchange: bool
    seed: int = 0
    block_bytes: int = field(default=2000)

    @staticmethod
    def drawn(rng: random.Random, most_rows: int, most_partitions: int) -> "Trial":
        names = SOURCES[: rng.randint(1, 3)]
        partitions = 2 ** rng.randint(0, most_partitions.bit_length() - 1)
        sizes = {name: min(most_rows, int(10 ** rng.uniform(0, np.log10(most_rows) + 0.01))) for name in names}
        weighted = rng.random() < 0.6
        weights = {name: rng.choice([None, 0.5, 1.0, 3.0]) if weighted else None for name in names}
        epochs = rng.choice([1, 1, 2, None])
        mixture: dict[str, Any] = {"temperature": rng.choice([1.0, 1.0, 2.0])}
        if any(weights.values()):
            mixture |= {
                "by": rng.choice(["samples", "tokens"]),
                "exhausted": rng.choice(["repeat", "drop", "stop"]) if epochs else "repeat",
            }
        formats = {name: rng.choice(FORMATS) for name in names}
        worlds = [w for w in (1, 2, 4, 8) if partitions % w == 0]
        sequences = max(worlds) * rng.randint(1, 4)
        stops = [rng.choice(worlds) for _ in range(rng.randint(2, 5))]
        limit = rng.choice([None, None, None, rng.randint(1, most_rows)])
        return Trial(
            sizes,
            formats,
            weights,
            partitions,
            sequences,
            epochs,
            mixture,
            rng.choice([0, 1, 8, 64]),
            limit,
            stops,
            rng.randint(1, 12),
            rng.random() < 0.3,
            rng.randint(0, 99),
        )


def numbers_of(trial: Trial, name: str) -> list[int]:
    """The numbers of a source's rows; the first leaves a sample. With weights all do: then it can be seen from the
    samples which rows were passed."""
    all_do = any(trial.weights.values())
    return list(itertools.islice((n for n in itertools.count(1) if not all_do or n % 11 != 5), trial.sizes[name]))


def written(trial: Trial, directory: Path, tokenizer: Tokenizer) -> dict[str, SourceSpec]:
    """The trial's sources."""
    found = {}
    for name, n in trial.sizes.items():
        numbers = numbers_of(trial, name)
        path = directory / f"{name}.{trial.formats[name]}"
        if trial.formats[name] == "parquet":
            pq.write_table(pa.table({"n": numbers}), path, row_group_size=max(1, n // 7))
        elif trial.formats[name] == "tokenized":
            path.mkdir(exist_ok=True)
            file = RowFile(path / "rows.parquet")
            for at in range(0, n, max(1, n // 5)):
                file.write([unit_columns(encode({"n": k}, name)) for k in numbers[at : at + max(1, n // 5)]])
            file.close()
            storage.commit(path, tokenized.made_by(tokenizer))
        else:
            text = "".join(json.dumps({"n": k}) + "\n" for k in numbers).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        kind = "tokenized" if trial.formats[name] == "tokenized" else "auto"
        told = n if trial.formats[name] == "jsonl.gz" else None
        found[name] = SourceSpec(
            str(path), trial.weights[name], kind, limit=trial.limit, epochs=trial.epochs, rows=told
        )
    return found


def partitions_of(trial: Trial, sources: dict[str, SourceSpec], tokenizer: Tokenizer | None) -> Partitions:
    return Partitions(
        sources,
        tokenizer,  # type: ignore[arg-type]
        encode,
        partitions=trial.partitions,
        seed=trial.seed,
        shuffle=trial.shuffle,
        seq_len=SEQ_LEN,
        lookahead=8,
        **trial.mixture,
    )


def documents(batch: Batch, sequence: int) -> list[tuple[int, ...]]:
    """Source, number and which, of each in a sequence."""
    flat, found = batch.tokens[sequence].numpy(), []
    segments = batch.segments[sequence].numpy()
    for first in np.flatnonzero(np.diff(segments, prepend=-2)):
        if segments[first] >= 0 and batch.lengths[segments[first]] > 1:
            source, high, low, i = flat[first : first + 4].tolist()
            found.append((source, high * BASE + low, i))
    return found


@contextmanager
def ranks(
    trial: Trial,
    sources: dict[str, SourceSpec],
    tokenizer: Tokenizer | None,
    world: int,
    state: Any,
    exchange: bool = False,
    **changes: Any,
):
    """The loaders of all ranks, whose partitions are the trial's with some changes."""
    peers = Threads.group(world) if exchange and world > 1 else [None] * world
    loaders = [
        Loader(
            replace(partitions_of(trial, sources, tokenizer), **changes),
            partitions=trial.partitions,
            sequences=trial.sequences,
            rank=rank,
            world_size=world,
            micro_batch_sequences=trial.sequences,
            seq_len=SEQ_LEN,
            peers=peer,
        )
        for rank, peer in enumerate(peers)
    ]
    try:
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        yield loaders
    finally:
        close(loaders)


def state_of(loaders: list[Loader]) -> dict[str, Any]:
    """The state of all ranks together, as a checkpoint holds it."""
    states = [loader.state_dict() for loader in loaders]
    assert len({state["step"] for state in states}) == 1
    partitions = {partition: one for state in states for partition, one in state["partitions"].items()}
    return pickle.loads(pickle.dumps({"step": states[0]["step"], "partitions": partitions}))


@contextmanager
def small_blocks(trial: Trial):
    """Files in many blocks, although they are small."""
    before, reader.LINES_BYTES = reader.LINES_BYTES, trial.block_bytes
    try:
        yield
    finally:
        reader.LINES_BYTES = before


def stepped(loaders: list[Loader]) -> list[list[tuple[int, ...]]]:
    """A global step: the documents of every sequence, by the sequence's number."""
    with ThreadPoolExecutor(len(loaders)) as pool:
        batches = list(pool.map(next, loaders))
    found = {
        number: documents(batch, i)
        for loader, (batch,) in zip(loaders, batches, strict=True)
        for i, number in enumerate(loader.numbers)
    }
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Outcome:
    differences: int  # steps that are others than without a stop
    not_once: int  # samples that did not come as often as the epochs, where each must
    not_said: int  # sources whose passes, or runs whose steps, are others than was said
    steps: int
    state_bytes: int  # of a partition, the most


def tried(trial: Trial, directory: Path, tokenizer: Tokenizer) -> Outcome:
    """The run without a stop; then with stops; then what was said of it."""
    with small_blocks(trial):
        sources = written(trial, directory, tokenizer)
        total = trial.steps * len(trial.worlds)
        said = planned(
            partitions_of(trial, sources, tokenizer),
            trial.sequences,
            total if trial.epochs is None else None,
            exact=True,
        )
        total = max(said.steps[1] + 1, total) if trial.epochs else total
        with ranks(trial, sources, tokenizer, 1, None) as (alone,):
            whole = [stepped([alone]) for _ in range(total)]
        state, parts, largest = None, [], 0
        each = -(-total // len(trial.worlds))
        for world in trial.worlds:
            with ranks(trial, sources, tokenizer, world, state, trial.exchange) as loaders:
                parts += [stepped(loaders) for _ in range(min(each, total - len(parts)))]
                state = state_of(loaders)
            largest = max(largest, *(len(pickle.dumps(one)) for one in state["partitions"].values()))
        differences = sum(a != b for a, b in zip(whole, parts, strict=True))
        seen = Counter(document for step in whole for sequence in step for document in sequence)
        return Outcome(
            differences,
            _not_once(trial, seen),
            _not_said(trial, partitions_of(trial, sources, tokenizer), said, whole),
            total,
            largest,
        )


def _not_once(trial: Trial, seen: Counter) -> int:
    if trial.epochs is None or (any(trial.weights.values()) and trial.mixture["exhausted"] != "drop"):
        return 0
    wanted: Counter = Counter()
    for name, n in trial.sizes.items():
        rows = numbers_of(trial, name)[: trial.limit or n]
        wanted.update(
            {(SOURCES.index(name), k, i): trial.epochs for k in rows for i in range(len(encode({"n": k}, name)))}
        )
    return sum(((wanted - seen) + (seen - wanted)).values())


def _not_said(trial: Trial, partitions: Partitions, said: DataPlan, whole: list[list[list[tuple[int, ...]]]]) -> int:
    found = dict.fromkeys(trial.sizes, 0.0)
    read = {
        (name, partition): _Read(partitions.opened(name)[0].partition(partition), name, trial)
        for name in trial.sizes
        for partition in range(trial.partitions)
    }
    for number, sequence in enumerate(itertools.chain.from_iterable(whole)):
        for source, *document in sequence:
            found[SOURCES[source]] += read[SOURCES[source], number % trial.partitions].rows_of(tuple(document))
    wrong = 0
    for name, n in trial.sizes.items():
        told = said.passes[name]
        wrong += told is None or abs(told[0] * min(n, trial.limit or n) - found[name]) > 1e-6 * max(1.0, found[name])
    if trial.epochs:
        wrong += next((i for i in range(len(whole), 0, -1) if any(whole[i - 1])), 0) != said.steps[1]
    return wrong


class _Read:
    """The documents of a partition in the order in which its rows are read, and for how many rows each stands: its
    share of its own row, and with the first of a row those without any document that were read since the last one that
    had some."""

    def __init__(self, rows: PartitionSource, name: str, trial: Trial) -> None:
        self._rows, self._name, self._numbers, self._without = rows, name, numbers_of(trial, name), 0
        # of every document, of each time that it was read and has not come yet
        self._found: dict[tuple[int, ...], list[float]] = {}

    def rows_of(self, document: tuple[int, ...]) -> float:
        """Of the next time that it comes."""
        while not self._found.get(document):
            n = self._numbers[int(next(self._rows).where.rpartition(":")[2]) - 1]
            parts = len(encode({"n": n}, self._name))
            for i in range(parts):
                self._found.setdefault((n, i), []).append(1 / parts + (0 if i else self._without))
            self._without = 0 if parts else self._without + 1
        return self._found[document].pop(0)
