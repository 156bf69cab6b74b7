"""Data as it should not be, through the partitions that a run reads: each is an error that says what and where, and
none costs memory or time without end."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ptf.data.document import PackUnit
from ptf.data.encode import encode_document
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.tiny import write_jsonl

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def partition(path: Path, tokenizer: Tokenizer, too_long: Any = "error") -> Any:
    def encode(row: Any, name: str) -> list[PackUnit]:
        return encode_document(row, tokenizer, name)

    return Partitions(
        {"x": SourceSpec(str(path))},
        tokenizer,
        encode,
        partitions=1,
        seed=0,
        shuffle=0,
        seq_len=64,
        lookahead=1,
        too_long=too_long,
    )(0)


def test_files_of_other_schemas_are_named(characters: Tokenizer, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"text": "1+1=2"}] * 3), tmp_path / "b.parquet")
    rows = partition(tmp_path, characters)
    with pytest.raises(
        UserError, match=r"b\.parquet:1 \(source x\): a row of kind chat needs `messages`; this one has \['text'\]"
    ):
        next(rows)


def test_rows_of_other_schemas_are_named(characters: Tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"prompt": "1+1=", "completion": "2"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        UserError,
        match=r"a\.jsonl:2 \(source x\): a row of kind chat needs `messages`; this one has \['completion', 'prompt'\]",
    ):
        next(partition(tmp_path, characters))


def test_columns_that_only_some_files_have_do_no_harm(characters: Tokenizer, tmp_path: Path) -> None:
    """Parquet files of one data set often differ in columns that nobody asks for, or in a type."""
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT, "id": 1}]), tmp_path / "a.parquet")
    pq.write_table(
        pa.Table.from_pylist([{"id": "2", "language": None, "messages": [{**m, "name": None} for m in CHAT]}]),
        tmp_path / "b.parquet",
    )
    rows = partition(tmp_path, characters)
    (first,), (second,), *_ = next(rows)
    assert first.tokens.tolist() == second.tokens.tolist()


LONG = 10_000_000  # bytes; more than a block of lines, and far more than a row that is trained


def test_a_row_of_ten_megabytes_does_not_fit(characters: Tokenizer, tmp_path: Path) -> None:
    escaped = r"\u0031" * (LONG // 6)  # that long in the file; a sixth of it to tokenize
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": CHAT}).replace("1+1=", asked) + "\n" for asked in ("1+1=", escaped))
    )
    with pytest.raises(
        UserError,
        match=r"a\.jsonl:2 \(source x\): 16666\d\d tokens do not fit data\.seq_len 64: raise it, or set data\.too_long",
    ):
        next(partition(tmp_path, characters))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_of_ten_megabytes_of_which_little_is_trained(characters: Tokenizer, tmp_path: Path, kind: str) -> None:
    rows = [{"messages": CHAT, "page": page} for page in ("", "x" * LONG, "")]
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    reader = partition(tmp_path, characters)
    assert len(next(reader)) > 3  # into a second pass
    assert reader.counts()["rows"] == reader.counts()["samples"]
