"""Events become histories: what is wrong with rows is said, and nothing that is held out is in what may be trained
on."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.errors import UserError
from ptf.events.histories import Basket, read, split, table

KNOWN = {"a", "b", "c"}


def rows(*events: tuple[Any, Any, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("f", {"user": user, "time": time, "item": item}) for user, time, item in events]


def test_a_basket_is_what_has_one_time_and_has_each_item_once() -> None:
    found = read(rows(("u", 1, "a"), ("u", 1, "b"), ("u", 1, "a"), ("v", 5, "c"), ("u", 2, "a")), {}, KNOWN)
    assert found.by_user == {"u": (Basket(1.0, ("a", "b")), Basket(2.0, ("a",)))}
    assert found.counts == {"rows": 5, "duplicates": 1, "unknown": 0, "single": 1}, (
        "v has one event, from which nothing can be learned"
    )


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("u", 2, "a"), ("u", 1, "b")], "f, event 2: the events of user 'u' are not in the order of time: 1 after 2"),
        ([("u", 1, "z")], "f, event 1: the item 'z' is not in the catalogue"),
        ([("u", "soon", "a")], "f, event 1: time must be a number of seconds, not 'soon'"),
        ([("u", float("nan"), "a")], "the column time is missing; this row has"),
        ([("u", float("inf"), "a")], "time must be a number of seconds, not inf"),
        ([("u", 1, "")], "the column item is missing; this row has"),
        ([(None, 1, "a")], "the column user is missing; this row has"),
        ([(float("nan"), 1, "a")], "the column user is missing; this row has"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(events: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        read(rows(*events), {}, KNOWN)


def test_disorder_and_unknown_items_may_be_allowed() -> None:
    found = read(rows(("u", 2, "a"), ("u", 1, "b"), ("u", 3, "z")), {}, KNOWN, unknown="drop", order="sort")
    assert [basket.items for basket in found.by_user["u"]] == [("b",), ("a",)]
    assert found.counts["unknown"] == 1


def test_prices_are_those_of_events_before_the_date() -> None:
    paid = [("u", 1, "a", "2.5"), ("u", 2, "a", 3.5), ("u", 3, "a", 9), ("u", 3, "b", 9), ("v", 2, "c", 1)]
    priced = [("f", {"user": user, "time": time, "item": item, "price": price}) for user, time, item, price in paid]
    found = read(priced, {"value": "price"}, KNOWN, date=3)
    assert {item: list(prices) for item, prices in found.prices.items()} == {"a": [2.5, 3.5], "c": [1.0]}
    without = read(priced, {}, KNOWN, date=3)
    assert {item: list(prices) for item, prices in without.prices.items()} == {"a": [], "c": []}
    assert read(priced, {"value": "price"}, KNOWN).prices == {}
    for price, message in ((-1, "price must be a number of at least 0, not -1"), ("", "the column price is missing")):
        with pytest.raises(UserError, match=f"f, event 1: {message}"):
            read([("f", {"user": "u", "time": 1, "item": "a", "price": price})], {"value": "price"}, KNOWN)
    with pytest.raises(UserError, match="columns: prize is none of user, time, item, value"):
        read(priced, {"prize": "price"}, KNOWN)


HISTORIES = st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True).map(
    lambda times: tuple(Basket(float(t), ("a",)) for t in sorted(times))
)


@settings(max_examples=200, deadline=None)
@given(history=HISTORIES, how=st.one_of(st.sampled_from(["last", "before_last"]), st.floats(-1, 60)))
def test_nothing_that_is_held_out_may_be_trained_on(history: tuple[Basket, ...], how: Any) -> None:
    s = split(history, how)
    assert not set(s.before) & set(s.future)
    assert all(a.time < b.time for a in s.before for b in s.future)
    assert (*s.before, *s.future) == history[: len(s.before) + len(s.future)]
    if how == "before_last":
        assert history[-1] not in (*s.before, *s.future)
    elif how == "last":
        assert s.future == history[-1:]
    else:
        assert (*s.before, *s.future) == history


def test_another_way_of_holding_out_is_refused() -> None:
    with pytest.raises(UserError, match="hold_out must be last, before_last or a time"):
        split((Basket(1.0, ("a",)),), "first")


def test_tables_are_csv_and_what_sources_are(tmp_path: Path) -> None:
    text = 'user,time,item\nu,1,"a, b"\n'
    (tmp_path / "x.csv").write_text(text)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "x.jsonl").write_text('{"user": "u", "time": 1, "item": "a, b"}\n')
    found = [[row for _, row in table(str(tmp_path / name))] for name in ("x.csv", "x.csv.gz", "x.jsonl")]
    assert found[0] == found[1] == [{"user": "u", "time": "1", "item": "a, b"}]
    assert read(((str(i), row) for i, row in enumerate(found[2] * 2)), {}, {"a, b"}).counts["duplicates"] == 1
    (tmp_path / "x.csv").write_text("user,time,item\nu,1\n")
    with pytest.raises(UserError, match="a row of 2 values under a header of 3 columns"):
        list(table(str(tmp_path / "x.csv")))
    broken = {
        "cut.csv.gz": gzip.compress(text.encode())[:-6],
        "no.csv.gz": text.encode(),
        "latin.csv": "user,time,item\nü,1,a\n".encode("latin-1"),
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}:.: not readable as CSV of UTF-8"):
            list(table(str(tmp_path / name)))
