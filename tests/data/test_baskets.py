"""Baskets are read in another order each time; nothing else about them changes,
and what they count stays with the place."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.baskets import permute_events, reorder_baskets
from ptf.data.encode import encode_events, limit_length
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

EVENT = st.text("abcdefgh", min_size=1, max_size=3)
ENTRIES = st.lists(st.one_of(EVENT, st.lists(EVENT, min_size=1, max_size=5)), min_size=2, max_size=6)


def events_of(tokens: np.ndarray, where: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    """Basket and tokens of every event, in order; of one in no basket, one of its tokens at a time."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for i, token in enumerate(tokens.tolist()):
        if i and where[i, 0] and (where[i] == where[i - 1]).all():
            found[-1] = (found[-1][0], (*found[-1][1], token))
        else:
            found.append((int(where[i, 0]), (token,)))
    return found


@settings(max_examples=150, deadline=None)
@given(entries=ENTRIES, seed=st.integers(0, 99), inside=st.sampled_from([1, 0.2, 0]))
def test_events_stay_whole_and_in_their_baskets(characters: Tokenizer, entries: Any, seed: int, inside: float) -> None:
    try:
        ((sample,),) = encode_events({"events": entries, "context": 1, "inside": inside}, characters)
    except UserError:
        return
    other = permute_events(sample, np.random.default_rng(seed))
    if not any(isinstance(entry, list) for entry in entries):
        assert other is sample
        return
    a, b = (events_of(s.tokens, s.token_columns["baskets"]) for s in (sample, other))
    assert sorted(a) == sorted(b)
    assert [basket for basket, _ in a] == [basket for basket, _ in b], "baskets stay where they are"
    assert [event for event in a if not event[0]] == [event for event in b if not event[0]]
    assert other.loss_weights[0] == 0
    firsts = np.flatnonzero(other.token_columns["baskets"][:, 1] == 0)
    counted = other.loss_weights[firsts[other.token_columns["baskets"][firsts, 0] > 1]]
    assert set(counted.tolist()) <= {0.0, 1.0}
    begins = (other.token_columns["baskets"][:, 0] > 0) & (other.token_columns["baskets"][:, 1] == 0)
    assert set(other.loss_weights[~begins].tolist()) <= {0.0, np.float32(inside)}


def test_every_order_comes_and_a_key_names_one(characters: Tokenizer) -> None:
    (unit,) = encode_events({"events": ["x", list("abc")]}, characters)

    def read(key):
        return [characters.decode(reorder_baskets(unit, f"{key}/{i}")[0].tokens) for i in range(60)]

    assert set(read("key")) == {"x" + a + b + c for a, b, c in ["abc", "acb", "bac", "bca", "cab", "cba"]}
    assert read("key") == read("key") != read("another")


@pytest.mark.parametrize(("most", "lengths"), [(4, [4, 3, 3]), (5, [4, 3, 3]), (7, [7, 3])])
def test_pieces_do_not_cut_an_event_that_fits(characters: Tokenizer, most: int, lengths: list[int]) -> None:
    (unit,) = encode_events({"events": ["x", ["abc", "def", "ghi"]]}, characters)
    pieces = limit_length(unit, most, "split")
    assert [len(sample) for (sample,) in pieces] == lengths
    assert all(sum(word in characters.decode(s.tokens) for (s,) in pieces) == 1 for word in ("abc", "def", "ghi"))
