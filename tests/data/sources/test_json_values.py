"""What columnar files hold beyond JSON's types is read as JSON lines would hold it."""

import base64
import datetime
import json
import uuid
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptf.data.partitions import pack_units_once
from ptf.data.prompts import Prompts, prompts_once
from ptf.data.sources.json_values import json_value
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data import read_form
from tests.tiny import write_jsonl

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": {"x": x}}]},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {"properties": {"x": x}}}}],
        "answer": x,
    }
    for name, x in [("f", "Rome"), ("g", {"y": [1, None]}), ("h", ["a", 2])]
]


def trained(path: Path, tokenizer: Tokenizer) -> str:
    """The text that SFT makes of the first row."""

    def encode(row: Any, source: str) -> Any:
        return read_form.RECIPES["sft"].encode(row, tokenizer, source)

    ((sample,), *_) = pack_units_once({"set": SourceSpec(str(path))}, encode=encode, seq_len=1000)
    return tokenizer.decode(sample.tokens)


def read(path: Path) -> list[dict[str, Any]]:
    return [place.read() for place in rows_once(Reader(str(path)))]


@pytest.mark.parametrize("stored", ["rows.parquet", "rows"])
def test_rows_that_datasets_stored_are_those_it_read(stored: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    loaded: Any = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    path = tmp_path / "stored" / stored
    path.parent.mkdir()
    loaded.to_parquet(str(path)) if stored.endswith("parquet") else loaded.save_to_disk(str(path))
    assert read(path) == ROWS == list(loaded)


TEXT = st.text('ab"\\é{', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda x: st.lists(x, max_size=2) | st.dictionaries(TEXT, x, max_size=2),
)
SCALARS: list[tuple[pa.DataType, Any, Any]] = [  # a type, its values, and what a value becomes
    (pa.string(), TEXT, lambda v: v),
    (pa.int64(), st.integers(-9, 9), lambda v: v),
    (pa.json_(), JSON, lambda v: v),
    (pa.uuid(), st.uuids(), str),
    (pa.decimal128(8, 2), st.decimals(-999, 999, places=2), lambda v: str(v.quantize(Decimal("0.01")))),
    (pa.date32(), st.dates(), datetime.date.isoformat),
    (pa.timestamp("us"), st.datetimes(datetime.datetime(1700, 1, 1)), datetime.datetime.isoformat),
    (pa.time64("us"), st.times(), datetime.time.isoformat),
    (pa.duration("s"), st.integers(0, 99).map(lambda s: datetime.timedelta(seconds=s)), str),
    (pa.dictionary(pa.int32(), pa.string()), TEXT, lambda v: v),
]


@st.composite
def columns(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, Any, Any]:
    """A type of Arrow's, a value of it, and the value that JSON has for it."""
    form = draw(st.sampled_from(["scalar", "list", "struct", "map"])) if depth else "scalar"
    if form == "scalar":
        kind, values, expected = draw(st.sampled_from(SCALARS))
        value = draw(values)
        none = value is None or draw(st.integers(0, 5)) == 0
        return kind, None if none else value, None if none else expected(value)
    kind, value, expected = draw(columns(depth=depth - 1))
    if form == "list":
        return pa.list_(kind), [value, None], [expected, None]
    if form == "map":
        return pa.map_(pa.string(), kind), [("k", value), ("l", None)], {"k": expected, "l": None}
    other, second, wanted = draw(columns(depth=depth - 1))
    return pa.struct({"a": kind, "b": other}), {"a": value, "b": second}, {"a": expected, "b": wanted}


def array(value: Any, kind: pa.DataType) -> pa.Array:
    """An array of one value; pyarrow makes no JSON from objects and no UUID in a list, so these are made of parts."""
    if value is None:
        return pa.nulls(1, kind)
    if isinstance(kind, pa.JsonType):
        return pa.ExtensionArray.from_storage(kind, pa.array([json.dumps(value)], kind.storage_type))
    if isinstance(kind, pa.UuidType):
        return pa.ExtensionArray.from_storage(kind, pa.array([value.bytes], kind.storage_type))
    if pa.types.is_map(kind):
        items = pa.concat_arrays([array(v, kind.item_type) for _, v in value])
        return pa.MapArray.from_arrays(pa.array([0, len(value)], pa.int32()), pa.array([k for k, _ in value]), items)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(
            pa.array([0, len(value)], pa.int32()), pa.concat_arrays([array(v, kind.value_type) for v in value])
        )
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([array(value[f.name], f.type) for f in kind], [f.name for f in kind])
    return pa.array([value], kind)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns())
def test_every_type_is_read_as_json(tmp_path: Path, column: tuple[pa.DataType, Any, Any]) -> None:
    kind, value, expected = column
    table = pa.table({"c": array(value, kind), "n": pa.array([1])})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert read(tmp_path / name) == [{"c": expected, "n": 1}]
    json.dumps(expected)


def test_nulls_inside_stored_json_are_the_rows_own(printable: Tokenizer, tmp_path: Path) -> None:
    """A struct has a null for each key of other rows; a null in JSON text was written there."""
    call = {"name": "f", "arguments": {"x": None}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    pq.write_table(pa.table({"messages": [json.dumps(messages)]}), tmp_path / "text.parquet")
    parts = pa.concat_arrays([array(message, pa.json_()) for message in messages])
    stored = pa.ListArray.from_arrays(pa.array([0, len(parts)], pa.int32()), parts)
    pq.write_table(pa.table({"messages": stored}), tmp_path / "json.parquet")
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "struct.parquet")
    texts = [trained(tmp_path / f"{name}.parquet", printable) for name in ("text", "json", "struct")]
    assert texts[0] == texts[1] != texts[2]


def test_rewards_get_the_same_values_from_a_stream_and_a_pass(printable: Tokenizer, tmp_path: Path) -> None:
    identity = uuid.UUID(int=1)
    table = pa.table(
        {
            "prompt": ["q"],
            "meta": array({"a": {"b": None}}, pa.json_()),
            "price": pa.array([Decimal("1.10")]),
            "day": pa.array([datetime.date(2020, 1, 2)]),
            "id": array(identity, pa.uuid()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    spec = SourceSpec(str(tmp_path / "a.parquet"))
    (once,) = prompts_once(spec, "set", printable)
    drawn = next(Prompts({"set": spec}, tokenizer=printable, seed=0, shuffle=4))
    expected = {"prompt": "q", "meta": {"a": {"b": None}}, "price": "1.10", "day": "2020-01-02", "id": str(identity)}
    assert once.row == drawn.row == expected


@pytest.mark.parametrize("where", ["nowhere", "arguments", "tools", "name", "prompt", "reward"])
def test_bytes_are_refused_where_they_would_be_printed(where: str, printable: Tokenizer, tmp_path: Path) -> None:
    data = base64.b64decode("/9g=")
    call = {"name": "f", "arguments": {"x": data if where == "arguments" else "1"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    if where == "name":
        answer["name"] = data
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}, answer], "unread": data}
    if where == "tools":
        row["tools"] = [{"name": "f", "description": data}]
    if where in ("prompt", "reward"):
        row = {"prompt": data if where == "prompt" else "q", "answer": "1" if where == "prompt" else data}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    spec = SourceSpec(str(tmp_path / "a.parquet"))
    if where == "nowhere":
        assert "<call>" in trained(tmp_path / "a.parquet", printable)
        return
    read_row = (
        partial(trained, tmp_path / "a.parquet", printable)
        if "messages" in row
        else Prompts({"set": spec}, tokenizer=printable, seed=0, shuffle=0).__next__
    )
    with pytest.raises(UserError, match="bytes are not text"):
        read_row()


def test_keys_of_maps_that_are_bytes_are_refused() -> None:
    with pytest.raises(UserError, match="keys that are bytes"):
        json_value([(b"k", 1)], pa.map_(pa.binary(), pa.int64()))
