"""What a customer had before, and when: the own items at the beginning of each basket, from the tokens of a history.

For `<start> A B <gap_0> A <gap_3>`, the last token begins the third basket. There the own items are A, which was in two
baskets, the newest of them, and B, which was in one, eight days before the newest. Trainer, engine and server compute
them here alone, from the tokens that the model reads, so they cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FEATURES = 13  # of an own item, see `_features`
PRIOR = 10.0  # items, of which 0.4 are repeated, that the share of repeated items begins with


@dataclass(frozen=True)
class EventTokens:
    """What the tokens of a model of events mean."""

    item: np.ndarray  # [vocab] int64: the index of the item that a token is, −1 if none
    days: np.ndarray  # [vocab] float32: the days that a gap token stands for, −1 for every other token
    request_time: bool = False  # whether these are the days until the next basket, not those since the one before


class OwnItems(NamedTuple):
    """The own items at some positions: of position p, those at `ends[p - 1]` to `ends[p]`."""

    ends: np.ndarray  # [positions] int64
    items: np.ndarray  # [own] int64, ascending at a position
    features: np.ndarray  # [own, FEATURES] float32


_NONE = np.zeros((0, FEATURES), np.float32)


def openings(tokens: np.ndarray, meaning: EventTokens) -> np.ndarray:
    """Return the number of the opening at or before each token, [tokens] int64, −1 if there is none. Each token that is
    not an item opens a basket."""
    return np.cumsum(meaning.item[tokens] < 0) - 1


def own_items(tokens: np.ndarray, meaning: EventTokens, wanted: np.ndarray) -> OwnItems:
    """Return the own items at the openings `wanted` (ascending numbers, see `openings`) of a history, [n] int32.

    What follows an opening does not change what it has.
    """
    item, number = meaning.item[tokens], openings(tokens, meaning)
    bought = item >= 0
    last = int(wanted.max()) if len(wanted) else -1
    bought &= number < last  # later than all that is asked for
    items, column = np.unique(item[bought], return_inverse=True)
    if not len(items):
        return OwnItems(np.zeros(len(wanted), np.int64), np.zeros(0, np.int64), _NONE)
    # one row a basket; a history that was cut has items before its first opening (−1), and two gaps may follow each
    # other
    filled, row = np.unique(number[bought], return_inverse=True)
    has = np.zeros((len(filled), len(items)), np.float32)
    has[row, column] = 1.0
    clock = np.cumsum(np.maximum(meaning.days[tokens[item < 0]], 0.0))  # days, at each opening
    known = np.searchsorted(filled, wanted)  # baskets before each opening
    # the time of a basket is in the gap after it, or already in the one before it
    at = np.where(filled < 0, 0.0, clock[filled]) if meaning.request_time else clock[filled + 1]
    return _features(has, at, known, clock[wanted], items)


def own_after(tokens: np.ndarray, meaning: EventTokens) -> OwnItems:
    """Return the own items after a history, at its newest opening; without any, at no position.

    They are without those that the basket has already, which it will not have again.
    """
    number = openings(tokens, meaning)
    newest = number[-1:][number[-1:] >= 0]
    own = own_items(tokens, meaning, newest)
    left = ~np.isin(own.items, meaning.item[tokens[number == number[-1:]]])
    return OwnItems(np.full(len(newest), left.sum()), own.items[left], own.features[left])


def _features(has: np.ndarray, at: np.ndarray, known: np.ndarray, now: np.ndarray, items: np.ndarray) -> OwnItems:
    """Return the own items after the first `known` baskets, at the times `now`; baskets are rows of `has`, [baskets,
    items], at the times `at`."""
    n, index = len(has), np.arange(len(has))[:, None]
    count = has.cumsum(0)
    newest = np.maximum.accumulate(np.where(has > 0, index, -1), 0)
    first = np.where(count > 0, has.argmax(0)[None], -1)
    size = has.sum(1)
    repeated = np.array([0.0, *((count[:-1] > 0) * has[1:]).sum(1)])
    later = np.where(index[:, 0] > 0, size, 0.0)
    repeats = (repeated.cumsum() + 0.4 * PRIOR) / (later.cumsum() + PRIOR)
    mean_size = np.log(size.cumsum() / (np.arange(n) + 1))
    ends, which, features = [], [], []
    for j, today in zip(known - 1, now, strict=True):
        own = np.flatnonzero(count[j] > 0) if j >= 0 else np.zeros(0, np.int64)
        ends.append(len(own))
        c, a, f = count[j, own], newest[j, own], first[j, own]
        days, first_days = today - at[a], today - at[f]
        between = (a - f) / np.maximum(c - 1, 1)
        days_between = (at[a] - at[f]) / np.maximum(c - 1, 1)
        columns = [  # all are about between 0 and 3
            np.log(c),  # baskets that have it
            c / (j + 1),
            np.log1p(j - a),  # baskets since the newest of them
            a == j,
            np.log1p(days) / 3,
            np.log1p(between),
            c == 1,
            np.where(c > 1, np.log1p(days / np.maximum(days_between, 1)), 0),
            np.log1p(j - f),
            np.log1p(first_days) / 3,
            np.full(len(own), np.log1p(max(j, 0))),
            np.full(len(own), mean_size[j]),
            np.full(len(own), repeats[j]),  # share of items that were own items when they were bought
        ]
        which.append(items[own])
        features.append(np.stack(columns, 1, dtype=np.float32, casting="unsafe"))
    return OwnItems(
        np.cumsum(ends), np.concatenate([np.zeros(0, np.int64), *which]), np.concatenate([_NONE, *features])
    )


def joined(parts: Sequence[OwnItems]) -> OwnItems:
    """Return the own items of several lists of positions, one after the other."""
    parts = [OwnItems(np.zeros(0, np.int64), np.zeros(0, np.int64), _NONE), *parts]
    before = np.cumsum([0, *(len(part.items) for part in parts)])
    ends = [part.ends + n for part, n in zip(parts, before, strict=False)]
    _, items, features = map(np.concatenate, zip(*parts, strict=True))
    return OwnItems(np.concatenate(ends), items, features)
