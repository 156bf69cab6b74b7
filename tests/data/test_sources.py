import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.sources import Source, rows_once
from ptf.errors import UserError

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


def take(source: Source, n: int) -> list[int]:
    return [next(source)[0]["n"] for _ in range(n)]


def test_one_pass_in_file_order(directory: Path) -> None:
    assert [row["n"] for row, _ in rows_once(str(directory))] == list(range(23))
    assert [row["n"] for row, _ in rows_once(f"{directory}/part[02]*")] == [*range(10), *range(11, 23)]
    assert [row["n"] for row, _ in rows_once(str(next(directory.glob("part1*"))))] == [10]


@pytest.mark.parametrize("lanes", [1, 4, 30])  # 30: more lanes than rows
def test_row_k_of_the_endless_list_goes_to_lane_k_mod_lanes(directory: Path, lanes: int) -> None:
    for lane in range(lanes):
        assert take(Source(str(directory), lane, lanes), 12) == [(lane + i * lanes) % 23 for i in range(12)]


@settings(deadline=None, max_examples=30)
@given(lanes=st.integers(1, 5), cuts=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_resumes_anywhere_again_and_again(directory: Path, lanes: int, cuts: list[int]) -> None:
    one = Source(str(directory), lanes - 1, lanes)
    whole = take(Source(str(directory), lanes - 1, lanes), sum(cuts) + 5)
    parts: list[int] = []
    for steps in [*cuts, 5]:
        parts += take(one, steps)
        other = Source(str(directory), lanes - 1, lanes)
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert other.epoch == one.epoch
        one = other
    assert parts == whole


def test_epochs_are_counted(directory: Path) -> None:
    source = Source(str(directory))
    assert source.rows is None
    take(source, 23)
    assert source.epoch == 0
    take(source, 1)
    assert (source.epoch, source.rows) == (1, 23)


def test_rows_know_where_they_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"n": 0}, {"n": 1}])
    assert [where for _, where in rows_once(str(path))] == [f"{path}:1", f"{path}:3"]  # line 2 is empty


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"n": 0}\n{"n": 1\n', r"a\.jsonl:2: not JSON"), ('{"n": 0}\n\n[1]\n', r"a\.jsonl:3: a row must be a JSON object, this is a list"),
     ("\n", r"no rows in .*a\.jsonl"), ('{"n": "\xff"}', r"a\.jsonl:1: not JSON")],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="latin-1")
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=message):
        list(rows_once(path))
    source = Source(path)
    with pytest.raises(UserError, match=message):
        take(source, 3)


def test_missing_data_is_named(tmp_path: Path) -> None:
    for path in ("nowhere", "*.jsonl"):
        with pytest.raises(UserError, match=r"nowhere|\*\.jsonl"):
            Source(str(tmp_path / path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"no \.jsonl, \.jsonl\.gz, \.parquet file in"):
        Source(str(tmp_path))


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(10000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(UserError, match=name):
            list(rows_once(str(tmp_path / name)))


def test_other_files_are_not_resumed_into(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"n": 0}])
    state = Source(str(tmp_path)).state_dict()
    write(tmp_path / "b.jsonl", [{"n": 1}])
    with pytest.raises(UserError, match="not those of the checkpoint"):
        Source(str(tmp_path)).load_state_dict(state)
