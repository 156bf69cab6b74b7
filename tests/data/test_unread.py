"""What no reader of a row takes is told: columns and keys of messages, once, wherever they first appear."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data import tokenized
from ptf.data.kinds import shaped
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import MESSAGE_KEYS, MOST, Unread
from ptf.recipes.sft.recipe import SFT
from tests.data.read_form import at
from tests.recipes.of_keys import of_keys
from tests.tiny import write_jsonl

ASK = {"role": "user", "content": "1"}
ANSWER = {"role": "assistant", "content": "2"}


def test_a_name_after_the_first_rows_is_told_once_and_the_first_ones_before(
    printable: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"messages": [ASK, ANSWER | {"early": 1}], "id": i} for i in range(300)]
    for i in (200, 250):
        rows[i] = {"messages": [ASK, ANSWER | {"late": 1, "tool_calls": None}], "id": i, "other": 1}
    path = tmp_path / "a.jsonl"
    write_jsonl(path, rows)
    made = Partitions(
        {"s": SourceSpec(str(path), epochs=2)},
        printable,
        lambda row, source: of_keys(SFT).encode(row, printable, source),
        partitions=2,
        seed=0,
        shuffle=0,
        seq_len=64,
        lookahead=4,
    )
    assert list(made.unread("s").names) == ["id", "early (of messages)"]
    assert not capsys.readouterr().out, "the first ones are for the run's first lines"
    for partition in (made(0), made(1)):
        for _ in partition:
            pass
    assert capsys.readouterr().out == f"source s: {path}:201: nothing reads other, late (of messages)\n"


def test_processes_that_tokenize_tell_a_name_once(
    printable: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized, "FEW_BYTES", 0)
    monkeypatch.setattr(tokenized, "ROWS_AT_ONCE", 2)
    rows = [{"messages": [ASK, ANSWER | ({"late": 1} if i > 150 else {})], "id": i} for i in range(300)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for processes in (1, 3):
        tokenized.write(
            str(tmp_path / f"{processes}"),
            SourceSpec(str(path)),
            "s",
            encode=lambda row, source: of_keys(SFT).encode(row, printable, source),
            seq_len=64,
            too_long="error",
            tokenizer=printable,
            config_fingerprint="",
            processes=processes,
        )
        lines = [line for line in capfd.readouterr().out.splitlines() if "nothing reads" in line]
        assert lines == [
            f"tokenize: source s: {path}:{number}: nothing reads {name}"
            for number, name in ((1, "id"), (152, "late (of messages)"))
        ]


def test_what_the_template_or_the_recipe_reads_is_not_told(printable: Tokenizer) -> None:
    row = {"messages": [ASK | {"speaker": "x"}, ANSWER | {"mood": 1, "score": 2}]}
    found = Unread(SourceSpec("", kind="chat"), printable, ("score",))
    before = printable.hf.chat_template
    printable.hf.chat_template = "{{ m.speaker }} a mood " + before
    aware = Unread(SourceSpec("", kind="chat"), printable, ("score",))
    printable.hf.chat_template = before
    for unread in (found, aware):
        unread(row, shaped(row, {}), at(row))
    assert list(found.names) == ["speaker (of messages)", "mood (of messages)"]
    assert list(aware.names) == ["mood (of messages)"], "a word of the template's text is no key"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=2), st.none() | st.integers(0, 1), max_size=3)))
def test_every_key_with_a_value_is_told_once(printable: Tokenizer, keys: list[dict[str, Any]]) -> None:
    unread = Unread(SourceSpec("", kind="chat"), printable)
    lines: list[str] = []
    unread.say = lines.append
    for more in keys:
        row = {"messages": [ASK, ANSWER | more]}
        unread(row, shaped(row, {}), at(row))
    expected = {key for more in keys for key, value in more.items() if value is not None} - {*MESSAGE_KEYS}
    assert sorted(unread.names) == sorted(f"{key} (of messages)" for key in expected)
    told = [name for line in lines for name in line.removeprefix("a.jsonl:1: nothing reads ").split(", ")]
    assert told == list(unread.names)


def test_a_label_that_says_nothing_of_the_response_is_told() -> None:
    unread = Unread(SourceSpec("", kind="completion"), None)
    for line, label in enumerate((1, "yes", None, 3, "math"), 1):
        row = {"prompt": "a", "completion": "b", "label": label}
        unread(row, row, at(row, line))
    assert unread.names == {"label": "a.jsonl:4"}
    unread = Unread(SourceSpec("", kind="text"), None)
    row = {"text": "a", "label": 0.5}
    unread(row, row, at(row))
    assert unread.names == {"label": "a.jsonl:1"}, "of a text no label is read, whatever it says"


def test_names_are_bounded() -> None:
    unread = Unread(SourceSpec("", kind="text"), None)
    for i in range(2 * MOST):
        row = {"text": "a", f"column {i}": 1}
        unread(row, row, at(row))
    assert len(unread.names) == MOST + 1
