"""A `.json` file read piece by piece: how long one value may be, and what its rows hold."""

import io
import json
from pathlib import Path

import pytest

from ptf.data.sources import json_array
from ptf.data.sources.json_array import Text
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import rows_once
from ptf.errors import UserError


@pytest.mark.parametrize(("length", "refused"), [(3900, False), (9000, True)])
def test_a_value_may_have_as_many_characters_as_the_limit(monkeypatch, length, refused):
    monkeypatch.setattr(json_array, "MAX_VALUE", 4096)
    monkeypatch.setattr(json_array, "READ", 512)
    element = b'{"a": "' + b"x" * length + b'"}'
    text = Text("rows.json", io.BytesIO(element + b"]"))
    if refused:
        with pytest.raises(UserError, match=r"rows\.json:1: a value has no end within 0 MiB; write the rows as JSON"):
            text.value()
    else:
        assert text.value() == element


def test_the_limit_is_256_mib():
    assert json_array.MAX_VALUE == 256 << 20


VALUES = ["123456789012345678901234567890", "1e999", "-0", "0.1", "NaN", "-Infinity", "true", "null"]
VALUES += [r'"\ud800"', r'"\ud83d\ude00"', '"\u00e9]{"', '{"b": 1, "b": 2}', '""', "[]", "{}", "[[1], {}]"]


@pytest.mark.parametrize("value", VALUES)
def test_a_row_is_what_the_decoder_of_python_gives(value: str, tmp_path: Path, monkeypatch) -> None:
    text = f'[{{"a": {value}, "a": {value}}},{{"a":{value}}}]'
    (tmp_path / "a.json").write_text(f'{{"n":{value},"rows":{text},"m":{value}}}')
    for read in (*range(1, 40), 1000):  # bytes, so that every place is the end of a piece
        monkeypatch.setattr(json_array, "READ", read)
        rows = [place.read() for place in rows_once(Reader(str(tmp_path / "a.json")))]
        assert repr(rows) == repr(json.loads(text))


def test_a_value_that_is_broken_is_named_before_the_file_is_read(monkeypatch) -> None:
    monkeypatch.setattr(json_array, "READ", 100)
    file = io.BytesIO(b'\n{"a": oops}' + b" " * 10_000)
    text = Text("rows.json", file)
    text.peek()
    with pytest.raises(UserError, match=r"rows\.json:2: not JSON: Expecting value"):
        text.value()
    assert file.tell() == 100


def test_a_block_that_failed_fails_again(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1}, 2]')
    reader = Reader(str(tmp_path / "a.json"))
    for _ in range(2):
        with pytest.raises(UserError, match="the array holds something else"):
            reader.block(0, 0)


@pytest.mark.parametrize("place", ["row", "other"])
def test_nesting_that_is_too_deep_is_refused(place: str, tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    other, row = (deep, "1") if place == "other" else ("1", deep)
    (tmp_path / "a.json").write_text(f'{{"other": {other},\n "rows": [{{"n": {row}}}]}}')
    with pytest.raises(UserError, match=r"a\.json:\d: more than 200 objects and lists inside each other"):
        print(list(rows_once(Reader(str(tmp_path / "a.json")))))


def test_bytes_that_are_no_text_are_an_error_of_their_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"n": 1}, {"n": "\xff"}, {"n": "\xed\xa0\x80"}]')
    first, second, third = rows_once(Reader(str(tmp_path / "a.json")))
    assert (first.read(), third.read()) == ({"n": 1}, {"n": "\ud800"})
    with pytest.raises(UserError, match="not JSON: 'utf-8' codec can't decode byte 0xff"):
        second.read()
