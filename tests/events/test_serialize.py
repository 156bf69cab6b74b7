"""Histories as rows: what a window has of a long history, and the token of a gap that knows the request's time."""

import re
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptf.events.catalogue import Item
from ptf.events.histories import Basket, History, Split
from ptf.events.own_items import EventTokens, openings, own_items
from ptf.events.serialize import DAY, GAPS, HistorySerializer, days_of, gap_of

ITEMS = [f"<i_{n}>" for n in range(40)]
TOKENS = {token: n for n, token in enumerate(["<start>", *(f"<gap_{n}>" for n in range(GAPS)), *ITEMS])}
MEANING = EventTokens(
    np.array([ITEMS.index(token) if token in ITEMS else -1 for token in TOKENS]),
    np.array([days_of(int(token[5:-1])) if token.startswith("<gap") else -1 for token in TOKENS], np.float32),
    request_time=True,
)


def serializer(window: int = 512, request_time: bool = False) -> HistorySerializer:
    return HistorySerializer(
        {token[1:-1]: Item(token[1:-1], token) for token in ITEMS}, window, True, 1.0, request_time
    )


def texts(row: dict[str, Any]) -> list[str]:
    return re.findall("<[^>]*>", row["messages"][0]["content"])


@st.composite
def histories(draw: st.DrawFn) -> History:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=15))
    gaps = draw(st.lists(st.floats(0.01, 300), min_size=len(sizes), max_size=len(sizes)))
    items = st.lists(st.integers(0, 39), min_size=6, max_size=6, unique=True)
    times = np.cumsum(gaps) * DAY
    return tuple(Basket(float(t), tuple(f"i_{n}" for n in draw(items)[:k])) for t, k in zip(times, sizes, strict=True))


@given(histories(), st.integers(24, 80))
def test_items_whose_baskets_do_not_fit_remain_own_items(history: History, window: int) -> None:
    tokens = texts(serializer(window).prompt("u", Split(history, ())))
    assert len(tokens) <= window
    newest = dict.fromkeys(f"<{name}>" for basket in reversed(history) for name in basket.items)
    assert set(tokens) & set(ITEMS) <= newest.keys()
    if len(newest) <= window // 4 - 2:
        assert set(tokens) & set(ITEMS) == newest.keys()
    whole = texts(serializer().prompt("u", Split(history, ())))
    kept = 0
    while kept < min(len(tokens), len(whole)) and tokens[-1 - kept] == whole[-1 - kept]:
        kept += 1  # the newest baskets are as they were
    assert kept >= min(len(whole), window // 2)


@given(histories(), st.floats(0, 300))
def test_with_the_time_of_the_request_the_last_gap_is_until_then(history: History, days: float) -> None:
    now = history[-1].time + days * DAY
    row = serializer(request_time=True).prompt("u", Split(history, ()), now)
    assert row["now"] == now
    assert texts(row)[-1] == f"<gap_{gap_of((now - history[-1].time) / DAY)}>"
    given_basket = serializer(request_time=True).prompt("u", Split(history, (Basket(now, ("i_0",)),)))
    assert given_basket["messages"] == row["messages"]
    assert texts(serializer(request_time=True).prompt("u", Split((), ()), now)) == ["<start>"]
    assert "now" not in serializer().prompt("u", Split(history, (Basket(now, ("i_0",)),)))


@given(histories(), st.floats(0, 300))
def test_days_of_own_items_are_near_those_of_the_calendar(history: History, days: float) -> None:
    now = history[-1].time + days * DAY
    tokens = np.array([TOKENS[t] for t in texts(serializer(request_time=True).prompt("u", Split(history, ()), now))])
    own = own_items(tokens, MEANING, openings(tokens, MEANING)[-1:])
    bought = {int(name[2:]): basket.time for basket in history for name in basket.items}
    for item, features in zip(own.items, own.features, strict=True):
        since = (now - bought[item]) / DAY
        assert abs(np.expm1(3 * features[4]) - since) <= 0.5 * since + len(history)


def test_a_gap_is_in_the_middle_of_what_it_stands_for() -> None:
    for gap in range(GAPS):
        assert gap_of(days_of(gap)) == gap
    assert [gap_of(days) for days in (0, 0.99, 1, 2, 3.99, 4, 1e6)] == [0, 0, 1, 2, 2, 3, GAPS - 1]
