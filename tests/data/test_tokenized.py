import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ptf.data import tokenized
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.document import Document, PackUnit
from ptf.data.encode import encode_document
from ptf.data.partitions import Partitions, pack_units_once
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.tiny import write_jsonl

LIMITS: dict[str, Any] = {"seq_len": 32, "too_long": "drop"}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    chats = [
        [{"role": "user", "content": f"{i}."}, {"role": "assistant", "content": "x" * (1 + i * i % 30)}]
        for i in range(1500)
    ]
    write_jsonl(path, [{"messages": m} for m in chats])
    return str(path)


def write(
    path: str, directory: Path, tokenizer: Tokenizer, encode: Any = None, config: str = "c", **options: Any
) -> Any:
    encode = encode or (lambda row, name: encode_document(row, tokenizer, name))
    prints = {"tokenizer": tokenizer, "config_fingerprint": config}
    return tokenized.write(str(directory), SourceSpec(path), "sums", encode=encode, **LIMITS, **prints, **options)


def partition(spec: SourceSpec, i: int, tokenizer: Tokenizer, shuffle: int = 50) -> Any:
    def encode(row: Any, name: str) -> list[PackUnit]:
        return encode_document(row, tokenizer, name)

    return Partitions({"sums": spec}, tokenizer, encode, partitions=3, seed=1, shuffle=shuffle, lookahead=8, **LIMITS)(
        i
    )


def rows_of(stream: Any, n: int) -> list[Any]:
    return [
        [(s.source, s.tokens.tobytes(), s.loss_weights.tobytes()) for a in next(stream) for s in a] for _ in range(n)
    ]


def test_training_sees_the_same_rows_as_on_the_fly(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    write(rows, tmp_path / "t", characters)
    ahead = SourceSpec(str(tmp_path / "t"), kind="tokenized")
    for i in range(3):
        one, other = partition(SourceSpec(rows), i, characters, 0), partition(ahead, i, characters, 0)
        assert rows_of(one, 400) == rows_of(other, 400)  # more than an epoch of about 240 rows a partition
    epochs = [
        [row for i in range(3) for row in partition(replace(spec, epochs=1), i, characters)]
        for spec in (SourceSpec(rows), ahead)
    ]
    one, other = ([s.tokens.tobytes() for row in epoch for (s,) in row] for epoch in epochs)
    assert one != other  # their blocks are others
    assert sorted(one) == sorted(other)
    whole = partition(ahead, 1, characters)
    rows_of(whole, 300)
    again = partition(ahead, 1, characters)
    again.load_state_dict(whole.state_dict())
    assert rows_of(again, 30) == rows_of(whole, 30)


def ahead_of(place: Path, tokenizer: Tokenizer, encode: Any) -> list[PackUnit]:
    specs = {"sums": SourceSpec(str(place), kind="tokenized")}
    return list(pack_units_once(specs, encode=encode, tokenizer=tokenizer, **LIMITS))


def test_one_pass_sees_the_same_units(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    manifest = write(rows, tmp_path / "t", characters)
    specs = {"sums": SourceSpec(rows)}
    direct = list(pack_units_once(specs, encode=lambda row, name: encode_document(row, characters, name), **LIMITS))
    ahead = ahead_of(tmp_path / "t", characters, None)
    assert len(direct) == len(ahead) == manifest["samples"]
    assert all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.loss_weights, b.loss_weights)
        for (a,), (b,) in zip(direct, ahead, strict=True)
    )


def test_the_manifest_counts(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    manifest = write(rows, tmp_path / "t", characters)
    assert manifest == json.loads((tmp_path / "t/manifest.json").read_text())
    assert manifest["rows"] == 1500
    assert manifest["samples"] + manifest["too_long"] == 1500
    assert manifest["too_long"] > 0
    assert manifest["expansion"] == 1.0
    assert set(manifest["files"]) == {"rows.parquet"}


def test_what_is_left_out_is_the_same_share_of_an_epoch(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    manifest = write(rows, tmp_path / "t", characters)
    for spec in (SourceSpec(rows), SourceSpec(str(tmp_path / "t"), kind="tokenized")):
        for epochs in (1, 3):
            partitions = [partition(replace(spec, epochs=epochs), i, characters) for i in range(3)]
            early = next(partitions[0]) and partitions[0].counts()
            assert 0 < early["rows_without_samples"] < early["rows"] < 200  # from the first step on
            again = partition(replace(spec, epochs=epochs), 0, characters)
            again.load_state_dict(partitions[0].state_dict())
            partitions[0] = again
            counts = [one.counts() for one in partitions if sum(map(len, one))]
            share = sum(c["rows_without_samples"] for c in counts) / sum(c["rows"] for c in counts)
            # partitions have looked at the first row that is not trained
            assert share == pytest.approx(manifest["too_long"] / 1500, abs=0.002)


def test_what_is_there_is_reused_unless_it_was_made_otherwise(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    first = write(rows, tmp_path / "t", characters)
    assert write("nowhere", tmp_path / "t", characters) == first
    assert write(rows, tmp_path / "t", characters, config="d")["config"] == "d"
    with pytest.raises(UserError, match="nowhere"):
        write("nowhere", tmp_path / "t", characters)  # the one for "c" is gone
    # a write that fails leaves what is there, and nothing beside it
    assert json.loads((tmp_path / "t/manifest.json").read_text())["config"] == "d"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_another_tokenizer_is_refused(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    write(rows, tmp_path / "t", characters)
    other = character_tokenizer("x0123456789.", tmp_path / "other")
    with pytest.raises(
        UserError,
        match=r"another tokenizer than the model's: for .* the ids \[.*\], but the model's tokenizer gives \[",
    ):
        partition(SourceSpec(str(tmp_path / "t"), kind="tokenized"), 0, other)
    (tmp_path / "t/manifest.json").unlink()
    with pytest.raises(UserError, match="its writing never finished"):
        partition(SourceSpec(str(tmp_path / "t"), kind="tokenized"), 0, characters)


def test_pairs_and_skipped_rows_keep_their_places(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    def pairs(row: Any, name: str) -> list[PackUnit]:
        (unit,) = encode_document(row, characters, name)
        second = Document(unit[0].tokens[:3], unit[0].loss_weights[:3], "second")
        return [] if len(unit[0]) % 2 else [(unit[0], second)] * 2

    write(rows, tmp_path / "t", characters, pairs)
    direct = list(pack_units_once({"sums": SourceSpec(rows)}, encode=pairs, **LIMITS))
    ahead = ahead_of(tmp_path / "t", characters, pairs)
    assert [[s.tokens.tolist() for s in a] for a in direct] == [[s.tokens.tolist() for s in a] for a in ahead]
    epoch = [partition(SourceSpec(str(tmp_path / "t"), kind="tokenized", epochs=1), i, characters) for i in range(3)]
    assert sum(len(list(one)) for one in epoch)
    # those without samples at a partition's end come with its next sample
    assert sum(one.passed["sums"] for one in epoch) == pytest.approx(1500, abs=20)
    assert {tuple(s.source for s in a) for a in ahead} == {("sums", "second")}


def test_streams_come_back_as_they_were(rows: str, characters: Tokenizer, tmp_path: Path) -> None:
    """One value a token, or k of them; of pairs too; also where the first rows leave nothing."""

    def encode(row: Any, name: str) -> list[PackUnit]:
        if row["messages"][0]["content"] < "0.~":  # the first row
            return []
        ((s,),) = encode_document(row, characters, name)
        n = len(s)
        token_columns = {"score": np.full(n, 0.5, np.float32), "ids": np.arange(3 * n, dtype=np.int32).reshape(n, 3)}
        one = Document(s.tokens, s.loss_weights, name, token_columns)
        other_columns = {key: values + 1 for key, values in token_columns.items()}
        return [(one, Document(s.tokens[::-1], s.loss_weights, name, other_columns))]

    write(rows, tmp_path / "t", characters, encode)
    direct = list(pack_units_once({"sums": SourceSpec(rows)}, encode=encode, **LIMITS))
    ahead = ahead_of(tmp_path / "t", characters, encode)
    assert len(direct) > 100
    for a, b in zip(direct, ahead, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.token_columns.keys() == other.token_columns.keys()
            assert all(values.dtype == other.token_columns[name].dtype for name, values in one.token_columns.items())
            assert all(np.array_equal(values, other.token_columns[name]) for name, values in one.token_columns.items())


@pytest.mark.parametrize("within", [True, False])
def test_streams_that_only_some_samples_carry_are_refused(
    rows: str, characters: Tokenizer, tmp_path: Path, within: bool
) -> None:
    """Of one row, or of rows far from each other."""

    def encode(row: Any, name: str) -> list[PackUnit]:
        ((s,),) = encode_document(row, characters, name)
        bare, carrying = s, Document(s.tokens, s.loss_weights, name, {"score": s.loss_weights})
        late = int(row["messages"][0]["content"][:-1]) > 1200
        return [(bare, carrying)] if within else [(carrying if late else bare,)]

    with pytest.raises(
        UserError,
        match="only some of the row's samples have"
        if within
        else r"samples have other per-token values than the first: \['score'\]",
    ):
        write(rows, tmp_path / "t", characters, encode)


@pytest.mark.long
def test_processes_write_what_one_does(characters: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, with the same counts and bad rows; a bad row that is not to be skipped is an error as ever."""
    monkeypatch.setattr(tokenized, "FEW_BYTES", 0)
    source = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"prompt": f"{i}+", "completion": "x" * (1 + i * i % 40)}) if i % 700 != 9 else "{"
        for i in range(3000)
    ]
    source.write_text("\n".join(lines))
    made = [write(str(source), tmp_path / f"t{n}", characters, max_bad_rows_share=0.1, processes=n) for n in (1, 3)]
    assert made[0]["bad"] == 5
    tables = [pq.read_table(tmp_path / f"t{n}" / "rows.parquet") for n in (1, 3)]
    assert tables[0].equals(tables[1])
    for key in ("rows", "samples", "tokens", "trained", "too_long", "bad"):
        assert made[0][key] == made[1][key]
    aside = [(tmp_path / f"t{n}" / tokenized.BAD_ROWS).read_text() for n in (1, 3)]
    assert aside[0] == aside[1]
    assert f"{source}:10" in aside[0]
    for processes in (1, 3):
        with pytest.raises(UserError, match=r"rows\.jsonl:10 \(source sums\): not JSON"):
            write(str(source), tmp_path / "bad", characters, processes=processes)
    assert not (tmp_path / "bad").exists()
