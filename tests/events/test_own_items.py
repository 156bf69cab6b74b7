"""Own items: what the tokens of a history say about them, against the definition written out, and nothing of what
follows."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptf.events.own_items import FEATURES, EventTokens, joined, openings, own_after, own_items

ITEMS, GAPS = 6, (0.5, 1.5, 3.0, 6.0)
# tokens: 0 start, 1 … 4 gaps, 5 … 10 items
MEANING = EventTokens(np.array([-1] * 5 + list(range(ITEMS))), np.array([-1.0, *GAPS, *[-1.0] * ITEMS], np.float32))
baskets = st.lists(
    st.tuples(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=4, unique=True), st.integers(1, 4)), max_size=8
)


def tokens_of(history: list[tuple[list[int], int]]) -> np.ndarray:
    return np.array([0, *(t for items, gap in history for t in (*(5 + i for i in items), gap))], np.int32)


def written_out(history: list[tuple[list[int], int]], request_time: bool) -> dict[int, list[float]]:
    """Of each own item after a whole history."""
    clock = np.cumsum([0.0, *(GAPS[gap - 1] for _, gap in history)])
    times = clock[:-1] if request_time else clock[1:]
    n, found = len(history), {}
    repeated = sum(i in {x for items, _ in history[:b] for x in items} for b in range(n) for i in history[b][0])
    later = sum(len(items) for items, _ in history[1:])
    for item in sorted({i for items, _ in history for i in items}):
        where = [b for b, (items, _) in enumerate(history) if item in items]
        count, first, newest = len(where), where[0], where[-1]
        days, since_first = clock[-1] - times[newest], clock[-1] - times[first]
        gap_days = (times[newest] - times[first]) / max(count - 1, 1)
        found[item] = [
            math.log(count),
            count / n,
            math.log(n - newest),
            newest == n - 1,
            math.log1p(days) / 3,
            math.log1p((newest - first) / max(count - 1, 1)),
            count == 1,
            math.log1p(days / max(gap_days, 1)) if count > 1 else 0,
            math.log(n - first),
            math.log1p(since_first) / 3,
            math.log(n),
            math.log(sum(len(items) for items, _ in history) / n),
            (repeated + 4) / (later + 10),
        ]
    return found


@given(baskets, st.booleans())
def test_features_are_those_of_the_definition(history, request_time) -> None:
    tokens = tokens_of(history)
    own = own_items(tokens, replace(MEANING, request_time=request_time), openings(tokens, MEANING)[-1:])
    expected = written_out(history, request_time)
    assert own.items.tolist() == list(expected)
    assert own.features.shape == (len(expected), FEATURES)
    np.testing.assert_allclose(own.features, np.array([*expected.values()]).reshape(own.features.shape), atol=1e-5)
    assert len(own.ends) == 1
    assert own.ends[-1] == len(expected)


@given(baskets, baskets)
def test_what_follows_changes_nothing(history, later) -> None:
    tokens, more = tokens_of(history), tokens_of([*history, *later])
    openings = np.arange(len(history) + 1)
    before, after = own_items(tokens, MEANING, openings), own_items(more, MEANING, openings)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@given(baskets)
def test_one_opening_has_what_all_have_there(history) -> None:
    tokens = tokens_of(history)
    openings = np.arange(len(history) + 1)
    apart = joined([own_items(tokens, MEANING, np.array([n])) for n in openings])
    for a, b in zip(apart, own_items(tokens, MEANING, openings), strict=True):
        np.testing.assert_array_equal(a, b)
    assert own_items(tokens, MEANING, openings[:0]).ends.tolist() == []


def test_a_basket_that_has_begun_is_not_owned_and_what_it_has_no_longer() -> None:
    tokens = np.array([0, 5, 6, 2, 5, 7], np.int32)  # the second basket has begun
    own = own_items(tokens, MEANING, openings(tokens, MEANING)[-1:])
    assert own.items.tolist() == [0, 1]
    np.testing.assert_array_equal(own.features, own_items(tokens[:4], MEANING, np.array([1])).features)
    left = own_after(tokens, MEANING)
    assert (left.items.tolist(), left.ends.tolist()) == ([1], [1])
    np.testing.assert_array_equal(left.features, own.features[1:])
    assert own_after(tokens[:4], MEANING).items.tolist() == [0, 1]
    assert own_after(tokens[1:3], MEANING).ends.tolist() == [], "no basket was opened"
