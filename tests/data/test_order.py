"""Which rows a partition reads: every row once an epoch, whatever the partitions,
in an order that mixes and that a place can go on from."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.document import Document
from ptf.data.order import Ordered, PartitionSource, shares, size
from ptf.data.partitions import Partitions
from ptf.data.sources import reader
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import SourceSpec
from ptf.data.stream import permutation

FORMATS = ("jsonl", "jsonl.gz", "parquet")


def write(path: Path, numbers: Any, group: int = 3) -> Path:
    text = "".join(json.dumps({"n": int(n), "text": ""}) + "\n\n" for n in numbers).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": np.asarray(numbers), "text": [""] * len(numbers)}), path, row_group_size=group)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """61 numbered rows in four files of several blocks."""
    root = tmp_path_factory.mktemp("order")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "LINES_BYTES", 60)
        for f, (start, end) in enumerate([(0, 30), (30, 31), (31, 43), (43, 61)]):
            write(root / f"part{f}.{request.param}", range(start, end))
        yield root


def ordered(path: Path, partitions: int, limit: int | None = None, window: int = 5, seed: int = 0) -> Ordered:
    return Ordered(Reader(str(path)), f"order/{seed}", partitions, window, limit)


def epochs(source: PartitionSource, n: int) -> list[list[int]]:
    """The numbers of a partition's rows in each of the first n epochs."""
    found: list[list[int]] = [[] for _ in range(n)]
    while (place := next(source)).epoch < n:
        found[place.epoch].append(place.read()["n"])
    return found


@settings(deadline=None, max_examples=25)
@given(partitions=st.integers(1, 90), limit=st.sampled_from([None, 1, 35, 60]), window=st.sampled_from([0, 1, 5, 100]))
def test_every_row_goes_to_one_partition_in_every_epoch(
    directory: Path, partitions: int, limit: int | None, window: int
) -> None:
    each = ordered(directory, partitions, limit, window)
    found = [epochs(each.partition(partition), 3) for partition in range(partitions)]
    rows = list(range(limit or 61))
    for e in range(3):
        assert sorted(n for partition in found for n in partition[e]) == rows
        totals = [sum(map(len, partition[: e + 1])) for partition in found]
        assert max(totals) - min(totals) <= 1  # over all epochs so far
    if not window:
        assert [partition[0] for partition in found] == [rows[i::partitions] for i in range(partitions)]


@settings(deadline=None, max_examples=25)
@given(
    partitions=st.integers(1, 9),
    window=st.sampled_from([0, 1, 5, 100]),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
def test_a_partition_goes_on_from_its_place_again_and_again(
    directory: Path, partitions: int, window: int, cuts: list[int]
) -> None:
    def take(source, n):
        return [(p.epoch, p.read()["n"]) for p in (next(source) for _ in range(n))]

    whole = take(ordered(directory, partitions, None, window).partition(partitions - 1), sum(cuts) + 20)
    one, parts = ordered(directory, partitions, None, window).partition(partitions - 1), []
    for n in [*cuts, 20]:
        parts += take(one, n)
        other = ordered(directory, partitions, None, window).partition(partitions - 1)
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        one = other
    assert parts == whole


def test_what_is_permuted(directory: Path) -> None:
    """Blocks by (seed, epoch); compressed files whole; the rows of a group; nothing without a shuffle, or before the
    first rows are chosen."""
    first, second, third = epochs(ordered(directory, 1).partition(0), 3)
    (other,) = epochs(ordered(directory, 1, seed=1).partition(0), 1)
    assert len({tuple(e) for e in (first, second, third, other)}) > 2
    assert epochs(ordered(directory, 1, window=0).partition(0), 2) == [list(range(61))] * 2
    assert sorted(epochs(ordered(directory, 1, 35).partition(0), 1)[0]) == list(range(35))

    def runs(window: int) -> int:
        """Of consecutive numbers."""
        (numbers,) = epochs(ordered(directory, 1, window=window).partition(0), 1)
        return sum(b != a + 1 for a, b in pairwise([-2, *numbers]))

    assert runs(5) > 20
    assert ordered(directory, 1).by_block or runs(1) <= 4


def test_rows_are_permuted_by_key_and_epoch(tmp_path: Path) -> None:
    """All rows of one block are one group; of a compressed file, 100 consecutive ones are."""
    for name in ("a.parquet", "a.jsonl.gz"):
        path = write(tmp_path / name, range(200), 200)
        first, second = epochs(ordered(path, 1, window=100).partition(0), 2)
        (other,) = epochs(ordered(path, 1, window=100, seed=1).partition(0), 1)
        assert len({tuple(found) for found in (first, second, other, range(200))}) == 4
        moved = np.abs(np.array(first) - np.arange(200)).mean()
        # a uniform permutation of n rows moves a row by n / 3
        assert moved == pytest.approx(200 / 3 if name == "a.parquet" else 100 / 3, rel=0.2)
        assert (max(first[:100]) < 100) == (name == "a.jsonl.gz")


def test_a_key_orders_rows_as_it_always_has() -> None:
    """A run that is resumed by a later version reads on where it was: the order that a key gives is a format."""
    assert permutation("k", 12).tolist() == [6, 1, 3, 7, 4, 10, 11, 8, 5, 9, 0, 2]


def test_groups_are_alike_but_for_a_small_first_one(tmp_path: Path) -> None:
    """So no group at the end of an epoch is of a few blocks, and training begins soon."""
    partition = ordered(write(tmp_path / "a.parquet", range(650), 5), 1, window=8).partition(0)
    assert [partition._block_groups()[0], len(partition._block_groups())] == [10, 3]
    for _ in range(650):
        next(partition)
    next(partition)
    assert np.diff(partition._block_groups()).tolist() == [215, 220]


@given(rows=st.integers(1, 3000), partitions=st.integers(1, 600), epoch=st.integers(0, 50))
def test_ranges_tile_an_epoch(rows: int, partitions: int, epoch: int) -> None:
    found = shares(rows, partitions, epoch, "key").tolist()
    assert [end - start for start, end in found] == [
        size(rows, partitions, epoch, partition) for partition in range(partitions)
    ]
    assert [n for start, end in sorted(found) for n in range(start, end)] == list(range(rows))
    assert {end - start for start, end in found} <= {rows // partitions, rows // partitions + 1}


def test_epochs_in_which_a_partition_has_no_row_are_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and 512 partitions: a partition has it in one epoch of 512, and looks at no other."""
    looked: list[int] = []
    pieces = Ordered.pieces

    def seen(self: Ordered, epoch: int, partition: int) -> np.ndarray:
        looked.append(epoch)
        return pieces(self, epoch, partition)

    monkeypatch.setattr(Ordered, "pieces", seen)
    partition = ordered(write(tmp_path / "one.parquet", [7]), 512, 8).partition(5)
    assert [next(partition).epoch for _ in range(20)] == [5 + 512 * i for i in range(20)]
    assert len(looked) <= 21


def labelled(directory: Path, rows: int, groups: int) -> SourceSpec:
    """Rows sorted by a binary label."""
    return SourceSpec(
        str(write(directory / "a.parquet", np.arange(rows) * 2 // rows, rows // groups)), kind="text", epochs=1
    )


def partitions_of(spec: SourceSpec, partitions: int, **options: Any) -> Partitions:
    def encode(row, name):
        return [(Document(np.full(4, row["n"], np.int32), np.ones(4, np.float32), name),)]

    return Partitions(
        {"a": spec},
        None,
        encode,
        partitions=partitions,
        seed=0,
        lookahead=64,
        **({"shuffle": 1024, "seq_len": 64} | options),
    )  # type: ignore[arg-type]


def labels(made: Partitions) -> np.ndarray:
    """Of all samples, in the order in which they are trained: row g of the run is of partition g mod partitions."""
    partitions, found = [made(partition) for partition in range(made.partitions)], []
    ended: set[int] = set()
    while len(ended) < len(partitions):
        for i, partition in enumerate(partitions):
            row = next(partition, None)
            if row is None:
                ended.add(i)
            else:
                found += [int(sample.tokens[0]) for (sample,) in row]
    return np.array(found)


def mixed(found: np.ndarray, among: int) -> float:
    """How many of all windows of so many samples have a share of the label between 0.3 and 0.7."""
    sums = np.cumsum(np.r_[0, found])
    shares = (sums[among:] - sums[:-among]) / among
    return float(((shares >= 0.3) & (shares <= 0.7)).mean())


def test_a_sorted_set_mixes(tmp_path: Path) -> None:
    """A tenth of 100,000 rows in 100 groups; benchmarks/loader_cost.py measures those."""
    spec = labelled(tmp_path, 10_000, 100)
    for partitions in (1, 8):
        found = labels(partitions_of(spec, partitions, shuffle=102))
        assert Counter(found.tolist()) == {0: 5000, 1: 5000}
        assert mixed(found, 100) > 0.9  # windows of 100 have three times the noise of 1,000
    assert mixed(labels(partitions_of(spec, 8, shuffle=0)), 100) < 0.1  # as the files have them


@pytest.mark.parametrize("partitions", [1, 8, 40])
def test_few_blocks_are_read_before_the_first_row(tmp_path: Path, partitions: int) -> None:
    made = partitions_of(labelled(tmp_path, 40_000, 200), partitions, shuffle=150)
    first = [made(partition) for partition in range(partitions)]
    assert all(len(next(partition)) == 16 for partition in first)
    assert made.opened("a")[0].reader.reads <= 2 * partitions
