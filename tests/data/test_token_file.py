"""The file of tokenized data: what comes back is what was written, to the bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf import storage
from ptf.data import tokenized
from ptf.data.document import Document, PackUnit
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import RowFile, TokenRows, runs, unit_columns
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

zeros_and_ones = st.lists(st.sampled_from([0.0, 1.0]), max_size=9)
weights = st.lists(st.sampled_from([0.0, 1.0, -0.0, 0.3, float("nan"), float("inf")]) | st.floats(width=32), max_size=9)


def sample(values: list[float], source: str, token_columns: bool) -> Document:
    n = len(values)
    tokens = (np.arange(n) * 7919 + ((1 << 31) - 7919 * n) * (n % 2)).astype(np.int32)
    carried = (
        {"score": np.array(values, np.float32), "ids": np.arange(3 * n, dtype=np.int32).reshape(n, 3)}
        if token_columns
        else {}
    )
    return Document(tokens, np.array(values, np.float32), source, carried)


def stored(rows: list[list[PackUnit]], path: Path, group: int) -> list[TokenRows]:
    file = RowFile(path)
    for at in range(0, len(rows), group):
        file.write([*map(unit_columns, rows[at : at + group])])
    file.close()
    table = pq.ParquetFile(path)
    return [TokenRows(table.read_row_group(i)) for i in range(table.num_row_groups)]


def said(units: list[PackUnit]) -> Any:
    """Everything of units; of floats, the bits."""

    def bits(token_columns):
        return [(name, v.dtype.name, v.shape, v.tobytes()) for name, v in sorted(token_columns.items())]

    return [
        [
            (
                s.tokens.tobytes(),
                s.loss_weights.dtype.name,
                s.loss_weights.tobytes(),
                s.source,
                bits(s.token_columns),
                s.prefix_length,
            )
            for s in unit
        ]
        for unit in units
    ]


def shapes(values: st.SearchStrategy[list[float]]) -> st.SearchStrategy[list[list[list[list[float]]]]]:
    """Rows of pack units of samples, each given by its weights."""
    return st.lists(st.lists(st.lists(values, min_size=1, max_size=3), max_size=3), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(
    shape=shapes(weights) | shapes(zeros_and_ones) | shapes(weights | zeros_and_ones),
    group=st.integers(1, 5),
    token_columns=st.booleans(),
)
def test_every_row_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, group: int, token_columns: bool
) -> None:
    rows = [
        [tuple(sample(values, "ab"[len(values) % 2], token_columns) for values in unit) for unit in row]
        for row in shape
    ]
    blocks = stored(rows, tmp_path_factory.mktemp("rows") / "rows.parquet", group)
    back = [block.units(i) for block in blocks for i in range(len(block))]
    assert [said(units) for units in back] == [said(units) for units in rows]


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    negative = Document(np.array([3, -3], np.int32), np.ones(2, np.float32), "a")
    with pytest.raises(AssertionError, match="negative token id"):
        stored([[(negative,)]], tmp_path / "rows.parquet", 1)


@given(weights)
def test_runs_are_the_weights(values: list[float]) -> None:
    found = np.array(values, np.float32)
    assert np.repeat(runs(found)[:, 1].view(np.float32), runs(found)[:, 0]).tobytes() == found.tobytes()
    assert (runs(found)[1:, 1] != runs(found)[:-1, 1]).all()


def written(directory: Path, tokenizer: Tokenizer, **more: Any) -> SourceSpec:
    """Rows of one sample, of none, of several, and of one that is long."""
    made = []
    for i in range(700):
        sizes = [[3 + i % 17]] if i % 7 else [[], [[2], [3, 4]], [[40]], [[5, 6]]][i // 7 % 4]
        sizes = [n if isinstance(n, list) else [n] for n in sizes]
        made.append(
            [
                tuple(Document(np.full(n, i, np.int32), np.arange(n, dtype=np.float32) // 3, "s") for n in unit)
                for unit in sizes
            ]
        )
    directory.mkdir(exist_ok=True)
    stored(made, directory / "rows.parquet", 50)
    storage.commit(directory, tokenized.made_by(tokenizer) | more)
    return SourceSpec(str(directory), kind="tokenized", epochs=2)


@pytest.mark.parametrize(("seq_len", "shuffle"), [(64, 60), (64, 1), (32, 60), (64, 900)])
def test_a_partition_resumes_with_the_same_rows_counts_and_states(
    characters: Tokenizer, tmp_path: Path, seq_len: int, shuffle: int
) -> None:
    """Also where some units do not fit."""
    options: dict[str, Any] = {
        "partitions": 3,
        "seed": 1,
        "shuffle": shuffle,
        "lookahead": 8,
        "seq_len": seq_len,
        "too_long": "drop",
    }
    spec = written(tmp_path / "t", characters)

    def partition():
        return Partitions({"a": spec}, characters, None, **options)(1)  # type: ignore[arg-type]

    def plain(state):
        return json.dumps(state, sort_keys=True)

    whole, resumed = partition(), partition()
    for i, sequence in enumerate(whole):
        assert said(next(resumed)) == said(sequence)
        assert resumed.counts() == whole.counts()
        if i % 5 == 0:
            assert plain(resumed.state_dict()) == plain(whole.state_dict())
        if i % 50 == 7:
            again = partition()
            again.load_state_dict(resumed.state_dict())
            resumed = again
    assert next(resumed, None) is None


def test_another_form_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    spec = written(tmp_path / "t", characters, storage=1)
    with pytest.raises(UserError, match=r"stored tokenized data in another form; tokenize it again"):
        tokenized.reader(spec.path, characters)


def test_a_flipped_byte_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    spec = written(tmp_path / "t", characters)
    assert tokenized.reader(spec.path, characters).counts()
    file = tmp_path / "t" / "rows.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(storage.Corrupt, match=r"rows\.parquet has changed"):
        tokenized.reader(spec.path, characters)


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for its own conversions to numpy, at a second of CPU time a process."""
    file = RowFile(tmp_path / "rows.parquet")
    five = Document(np.arange(5, dtype=np.int32), np.ones(5, np.float32), "a")
    file.write([unit_columns([(five,)])])
    file.close()
    program = (
        "import sys, pyarrow.parquet as pq\n"
        "from ptf.data.token_file import TokenRows\n"
        "rows = TokenRows(pq.ParquetFile(sys.argv[1]).read_row_group(0, use_threads=False))\n"
        "assert rows.units(0)[0][0].tokens.tolist() == [0, 1, 2, 3, 4]\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "rows.parquet")], check=True, timeout=120)
