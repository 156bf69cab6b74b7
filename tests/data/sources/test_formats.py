"""Every format gives the same rows, at places that say where they are, from any block on;
a file that breaks off is an error with its place."""

import csv
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.order import Ordered
from ptf.data.sources import reader as readers
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, rows_once
from ptf.errors import UserError

SUFFIXES = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "parquet", "arrow", "feather"]
ROWS = [{"n": str(n), "text": 'é "quoted", [bracket} \\ \n' * (n % 3)} for n in range(40)]


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def csv_of(rows: list[dict[str, str]]) -> str:
    quoted = ([f'"{value}"' for value in (v.replace('"', '""') for v in row.values())] for row in rows)
    return "".join(",".join(values) + "\n" for values in [list(rows[0]), *quoted])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    match path.name.partition(".")[2]:
        case "jsonl":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.zst":
            # two frames, as parallel compressors write
            path.write_bytes(zstd(lines[: len(lines) // 2]) + zstd(lines[len(lines) // 2 :]))
        case "json":
            path.write_text(json.dumps(rows, indent=1))
        case "csv":
            path.write_text("\ufeff" + csv_of(rows))
        case "parquet":
            pq.write_table(table, path, row_group_size=7)
        case "feather":
            pyarrow.feather.write_feather(table, path, chunksize=7)
        case "arrow":
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("where", ["local", "remote"])
def test_every_format_gives_the_rows_and_resumes(
    suffix: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LINES_BYTES", 300)
    uri = str(write(tmp_path / f"a.{suffix}", ROWS))
    if where == "remote":
        fsspec.filesystem("memory").pipe_file(f"/formats/a.{suffix}", Path(uri).read_bytes())
        uri = f"memory://formats/a.{suffix}"
    reader = Reader(uri)
    found = [place.read() for place in rows_once(reader)]
    assert found == ROWS
    count = next(n for n in range(1000) if reader.block(0, n) is None)
    assert count > 4
    held = [reader.block(0, n) for n in range(count)]
    counts = reader.counts()
    assert (counts is not None) == (
        suffix == "parquet" or (where == "local" and suffix in ("jsonl", "arrow", "feather"))
    )
    assert counts in (None, [[(len(block), block.lines) for block in held if block is not None]])
    monkeypatch.setattr(readers, "KEEP_BYTES", 0)
    again = Reader(uri)
    for n in random.Random(0).sample(range(count), count):  # in any order, each read anew
        block, expected = again.block(0, n), held[n]
        assert block is not None
        assert expected is not None
        assert [block.row(i) for i in range(len(block))] == [expected.row(i) for i in range(len(expected))]
    source, resumed, whole = (Ordered(Reader(uri), "order", 3, 4).partition(1) for _ in range(3))
    first = [next(source).read()["n"] for _ in range(17)]
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [*first, *(next(resumed).read()["n"] for _ in range(17))] == [next(whole).read()["n"] for _ in range(34)]


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_file_that_breaks_off_is_named(suffix: str, where: str, tmp_path: Path) -> None:
    whole = write(tmp_path / f"a.{suffix}", ROWS).read_bytes()
    for end in (len(whole) // 2, len(whole) - 2):
        uri = str(tmp_path / f"a.{suffix}")
        Path(uri).write_bytes(whole[:end])
        if where == "remote":
            fsspec.filesystem("memory").pipe_file(f"/formats/a.{suffix}", whole[:end])
            uri = f"memory://formats/a.{suffix}"
        with pytest.raises(UserError, match=rf"a\.{suffix}"):
            print([place.read() for place in rows_once(Reader(uri))])


def places(path: Path) -> list[str]:
    return [place.where.rpartition(":")[2] for place in rows_once(Reader(str(path)))]


def test_places_are_lines_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINES_BYTES", 10)
    (tmp_path / "a.csv").write_text('n,text\n1,"two\nlines"\n\n2,one\n')
    assert places(tmp_path / "a.csv") == ["2", "5"]
    (tmp_path / "a.json").write_text('[\n {"n": 1},\n {\n  "n": 2},\n {"n": 3}, {"n": 4}\n]\n')
    assert places(tmp_path / "a.json") == ["2", "3", "5", "5"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            (
                '{"version": "1", "of": {"a": [1]}, "tags": ["x", "y"], "empty": [], "data": [{"n": 1}, {"n": 2}], '
                '"count": 2, "more": null}'
            ),
            [1, 2],
        ),
        ('{"n": 1}\n{"n": 2}\n', [1, 2]),  # JSON lines under another name
        ('\ufeff [ {"n": 1} ]', [1]),
    ],
)
def test_forms_of_json(text: str, rows: list[int], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert [place.read()["n"] for place in rows_once(Reader(str(tmp_path / "a.json")))] == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"train": [{"n": 1}], "test": [{"n": 2}]}', "lists of objects under train, test"),
        ("a.json", '{"n": [1, 2]}', "no list of objects"),
        ("a.json", '[{"n": 1},\n 5, {"n": 2}]', r"a\.json:2: the array holds something else than objects"),
        ("a.json", '[{"n": 1}]\n[{"n": 2}]', r"a\.json:2: there is more text after the end of the array"),
        ("a.json", "hello", r"a\.json:1: a \.json file must begin with"),
        ("a.json", '[{"n": 1}, {"n": 2,}]', r"a\.json:1: not JSON"),
        ("a.json", '[\n{"n": 1},\n{"n": "2', r"a\.json:3: the file breaks off"),
        ("a.json", '{"rows": [{"n": 1}], [2]: 3}', r"a\.json:1: not a JSON object"),
        ("a.json", '{"rows": [{"n": 1}],\n', r"a\.json:\d: the file breaks off"),
        ("a.json", '{"rows":\n[{"n": {}', r"a\.json:2: the file breaks off"),
        ("a.json", '[{"n": 1},\n{"n": "\\u20', r"a\.json:2: the file breaks off"),
        ("a.json", '[{"n": 1}, {"n": tru', r"a\.json:1: the file breaks off"),
        ("a.json", "[", r"a\.json:1: the file breaks off"),
        ("a.json", '[{"n": 1} {"n": 2}]', r"a\.json:1: not JSON: no comma and no \] after a value"),
        ("a.json", '{"rows": [{"n": 1}]}\n[]', r"a\.json:2: there is more text after the end of the object"),
        ("a.json", '{"rows" [{"n": 1}]}', r"a\.json:1: not a JSON object"),
        ("a.csv", "n,text\n1,a\n2\n", r"a\.csv:3: a row of 1 values under a header of 2 columns"),
        ("a.csv", "n,n\n1,a\n", r"a\.csv:1: the header must name every column"),
        ("a.csv", 'n,text\n1,a\n2,"b\n', r"a\.csv:3: not readable as CSV"),
        ("a.csv", "n,text\n1,\udce9\n", r"a\.csv:2: not readable as CSV of UTF-8"),
        ("a.csv", "n,text\n", r"no rows in .*a\.csv"),
        ("a.json", "[]", r"no rows in .*a\.json"),
    ],
)
def test_what_is_no_table_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        print([read(place) for place in rows_once(Reader(str(tmp_path / name)))])


def read(place: RawRow) -> dict[str, Any]:
    try:
        return place.read()
    except UserError as error:
        raise UserError(f"{place.where}: {error}") from None


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=40)
@given(
    rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=8),
    size=st.integers(1, 200),
    read=st.integers(1, 50),
    indent=st.sampled_from([None, 2]),
    ascii=st.booleans(),
    inside=st.booleans(),
)
def test_arrays_are_cut_where_their_elements_end(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    size: int,
    read: int,
    indent: int | None,
    ascii: bool,
    inside: bool,
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    value = {"a": "]", "rows": [{}, *rows], "b": 1} if inside else [{}, *rows]
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=ascii))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "LINES_BYTES", size)
        patch.setattr("ptf.data.sources.json_array.READ", read)
        found = list(rows_once(Reader(str(path))))
        assert [place.read() for place in found] == [{}, *rows]
        if indent:
            lines = path.read_text().split("\n")
            assert all("{" in lines[int(place.where.rpartition(":")[2]) - 1] for place in found)


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    assert [place.read() for place in rows_once(Reader(str(tmp_path / "saved")))] == ROWS
    assert [len(blocks) for blocks in Reader(str(tmp_path / "saved")).counts() or ()] == [1, 1, 1]


def test_a_csv_file_may_hold_a_long_document(tmp_path: Path) -> None:
    """Python's own limit is 131,072 characters, and holds for the whole process."""
    limit = csv.field_size_limit(1000)
    try:
        (tmp_path / "long.csv").write_text(csv_of([{"text": "x" * 200_000}]))
        found = [place.read() for place in rows_once(Reader(str(tmp_path / "long.csv")))]
        assert [len(row["text"]) for row in found] == [200_000]
    finally:
        csv.field_size_limit(limit)
