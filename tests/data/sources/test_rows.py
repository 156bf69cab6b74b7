import gzip
import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.config import loads
from ptf.data.order import Ordered, PartitionSource
from ptf.data.sources import reader as readers
from ptf.data.sources.blocks import Lines
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import rows_once, specs
from ptf.errors import UserError
from tests.tiny import write_jsonl

FORMATS = ("jsonl", "jsonl.gz", "parquet")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text.replace("\n", "\n\n", 1))  # an empty line is no row
    return path


@pytest.fixture(scope="module", params=FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 numbered rows in three files, and a file that is none."""
    root = tmp_path_factory.mktemp("source")
    for f, (start, end) in enumerate([(0, 10), (10, 11), (11, 23)]):
        write(root / f"part{f}.{request.param}", [{"n": n, "text": "é" * (n % 4)} for n in range(start, end)])
    (root / "manifest.json").write_text("{}")
    return root


def take(source: PartitionSource, n: int) -> list[int]:
    return [next(source).read()["n"] for _ in range(n)]


def all_of(path: Path | str, limit: int | None = None) -> list[int]:
    return [place.read()["n"] for place in rows_once(Reader(str(path)), limit)]


def test_one_pass_in_file_order(directory: Path) -> None:
    assert all_of(directory) == list(range(23))
    assert all_of(directory, 12) == list(range(12))
    assert all_of(f"{directory}/part[02]*") == [*range(10), *range(11, 23)]
    assert all_of(next(directory.glob("part1*"))) == [10]


def test_rows_know_where_they_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"n": 0}, {"n": 1}])
    assert [place.where for place in rows_once(Reader(str(path)))] == [f"{path}:1", f"{path}:3"]  # line 2 is empty
    for window in (4, 0):
        source = Ordered(Reader(str(path)), "key", 2, window).partition(1)
        assert {next(source).where for _ in range(20)} <= {f"{path}:1", f"{path}:3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"n": 0}\n{"n": 1\n', r"not JSON"),
        ('{"n": 0}\n\n[1]\n', r"a row must be a JSON object, this is a list"),
        ("\n", r"no rows in .*a\.jsonl"),
        ("", r"no rows in .*a\.jsonl"),
        ('{"n": "\xff"}', r"not JSON: 'utf-8'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="latin-1")
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=message):
        all_of(path)
    for window in (4, 0):
        with pytest.raises(UserError, match=message):
            take(Ordered(Reader(path), "key", 1, window).partition(0), 3)


def test_missing_data_is_named(tmp_path: Path) -> None:
    for path in ("nowhere", "*.jsonl"):
        with pytest.raises(UserError, match=r"nowhere|\*\.jsonl"):
            Reader(str(tmp_path / path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"no \.jsonl, \.jsonl\.gz, .*\.feather file in"):
        Reader(str(tmp_path))


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(10000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(UserError, match=name):
            all_of(tmp_path / name)


def test_other_files_are_not_resumed_into(tmp_path: Path) -> None:
    def partition():
        return Ordered(Reader(str(tmp_path)), "key", 1, 4).partition(0)

    write(tmp_path / "a.jsonl", [{"n": 0}])
    state = partition().state_dict()
    write(tmp_path / "a.jsonl", [{"n": 10}])
    with pytest.raises(UserError, match="not those of the checkpoint"):
        partition().load_state_dict(state)
    write(tmp_path / "a.jsonl", [{"n": 0}])
    partition().load_state_dict(state)
    write(tmp_path / "b.jsonl", [{"n": 1}])
    with pytest.raises(UserError, match="not those of the checkpoint"):
        partition().load_state_dict(state)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    partition = Ordered(Reader(str(write(tmp_path / "a.jsonl", [{"n": 0}, {"n": 1}]))), "key", 1, 4).partition(0)
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n')
    with pytest.raises(UserError, match=r"a\.jsonl has other rows than when they were counted"):
        next(partition)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=40),
    size=st.integers(1, 64),
    kept=st.sampled_from([0, 100, 1 << 20]),
    ended=st.booleans(),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz"]),
    order=st.randoms(use_true_random=False),
)
def test_blocks_are_the_lines_wherever_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    size: int,
    kept: int,
    ended: bool,
    name: str,
    order: random.Random,
) -> None:
    lines = [b"%d " % n + b"x" * length if length else b"" for n, length in enumerate(lengths)]
    text = b"\n".join(lines) + b"\n" * ended
    path = tmp_path_factory.mktemp("blocks") / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "LINES_BYTES", size)
        patch.setattr(readers, "KEEP_BYTES", kept)
        reader = Reader(str(path))
        count = next(n for n in itertools.count() if reader.block(0, n) is None)
        found = {n: reader.block(0, n) for n in order.sample(range(count), count)}  # in any order
    texts: list[tuple[int, bytes]] = []
    before = 0
    for n in range(count):
        block = found[n]
        assert isinstance(block, Lines)
        texts += [(before + block.line(i), block.texts[i].rstrip(b"\n")) for i in range(len(block))]
        before += block.lines
    assert texts == [(n, line) for n, line in enumerate(lines) if line]


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


class Counting:
    """A store that answers, and fails at some of the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: set[int]) -> None:
        self.asked, self.fails, files = 0, fails, fsspec.filesystem("memory")
        real = files.cat_file
        monkeypatch.setattr(
            type(files), "cat_file", lambda _, *args, **kwargs: (self._count(), real(*args, **kwargs))[1]
        )
        monkeypatch.setattr("ptf.storage.store.time.sleep", lambda s: None)

    def _count(self) -> None:
        self.asked += 1
        if self.asked in self.fails:
            raise ConnectionResetError("the store went away")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_store_that_fails_now_and_then_is_asked_again(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"n": n, "text": "x" * 5000} for n in range(60)]
    fsspec.filesystem("memory").pipe_file(f"/rows/a.{suffix}", write(tmp_path / f"a.{suffix}", rows).read_bytes())
    monkeypatch.setattr(readers, "LINES_BYTES", 30_000)
    store = Counting(monkeypatch, {1, 2, 4})
    assert all_of("memory://rows") == list(range(60))
    assert store.asked > (4 if suffix == "jsonl" else 2)  # what is compressed is one request
    assert "ConnectionResetError: the store went away; trying again in 1 s" in capfd.readouterr().err
    store.fails = set(range(1000))
    monkeypatch.setattr("ptf.storage.store.GIVE_UP_S", -1.0)
    with pytest.raises(UserError, match=r"memory.*rows.*: the store has failed for"):
        all_of("memory://rows")


def test_partitions_read_a_remote_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"n": n, "text": "x" * 10_000} for n in range(100)]
    fsspec.filesystem("memory").pipe_file("/rows/a.jsonl", write(tmp_path / "a.jsonl", rows).read_bytes())
    monkeypatch.setattr(readers, "LINES_BYTES", 50_000)
    store = Counting(monkeypatch, set())
    ordered = Ordered(Reader("memory://rows"), "key", 8, 4)
    partitions = [ordered.partition(partition) for partition in range(8)]
    assert sorted(n for _ in range(12) for n in [take(partition, 1)[0] for partition in partitions]) == list(range(96))
    assert 8 <= store.asked <= 1_000_000 / 50_000 + 2


def test_rows_in_all_are_known_from_those_read_whatever_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LINES_BYTES", 1000)
    monkeypatch.setattr(readers, "KEEP_BYTES", 0)
    write_jsonl(tmp_path / "a.jsonl", [{"n": n, "text": "x" * 80} for n in range(1000)])
    reader = Reader(str(tmp_path))
    for number in range(20):
        reader.block(0, number)
    assert reader.rows == pytest.approx(1000, rel=0.05)


def test_what_is_held_of_a_large_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four partitions read 24 MB in blocks of 256 KB, of which 1 MB are kept;
    without that bound they would hold all of it."""
    monkeypatch.setattr(readers, "LINES_BYTES", 1 << 18)
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"n": n, "text": "x" * 4000}) + "\n" for n in range(6000))

    def peak(keep: int) -> int:
        monkeypatch.setattr(readers, "KEEP_BYTES", keep)
        ordered = Ordered(Reader(str(path)), "key", 4, 0)
        partitions = [ordered.partition(partition) for partition in range(4)]
        tracemalloc.start()
        try:
            numbers = [next(partitions[k % 4]).read()["n"] for k in range(6000)]
            assert numbers == list(range(6000))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1 << 20) < 4 << 20
    assert peak(1 << 30) > 20 << 20


class Sized:
    """A block that counts how often it was asked for its size."""

    asked, lines, columnar = 0, 1, False

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        Sized.asked += 1
        return self._nbytes


def test_what_is_held_is_bounded_without_adding_up_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks of small files: each is asked for its size when it is kept and when it is dropped."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.setattr(readers, "KEEP_BYTES", 20_000)
    monkeypatch.setattr(Sized, "asked", 0)
    reader, sizes = Reader(str(tmp_path)), [random.Random(n).randrange(100) for n in range(1000)]
    monkeypatch.setattr(reader, "_read", lambda key: Sized(sizes[key[1]]))
    for number in range(1000):
        reader.block(0, number)
        kept = [sizes[n] for _, n in reader._cache]
        assert sum(kept) <= 20_000
        assert len(kept) == number + 1 or sum(kept) + sizes[number - len(kept)] > 20_000, "no more is dropped"
    assert 1000 <= Sized.asked <= 2000


def test_a_source_has_its_own_settings_and_else_those_of_the_job():
    given = {
        "plain": {"path": "a.jsonl"},
        "own": {"path": "b.jsonl", "kind": "text", "epochs": 3, "limit": 7, "sampling_weight": 2.0},
    }
    raw = {
        "recipe": "sft",
        "model": {"path": "m"},
        "data": {"sources": given, "seq_len": 8},
        "train": {"epochs": 2, "lr": 1e-3},
    }
    sources = loads(yaml.safe_dump(raw)).data.sources
    found = specs(sources, 2, 1e9)
    assert {name: one.epochs for name, one in found.items()} == {"plain": 2, "own": 3}
    assert {name: one.epochs for name, one in specs(sources).items()} == {"plain": None, "own": 3}
    own = found["own"]
    assert (own.path, own.kind, own.limit, own.verify_up_to) == ("b.jsonl", "text", 7, 1e9)
    assert specs(sources)["plain"].verify_up_to == float("inf")
