"""A trie takes exactly the answers that it was made of."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.trie import OVER, Trie
from ptf.errors import UserError

STOP = (1, 2)
answers = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


def takes(trie: Trie, tokens) -> bool:
    try:
        seen = trie.walked(tokens)
    except ValueError:
        return False
    assert len(seen) == len(tokens)
    assert seen[0] == 0
    return trie.follow(int(seen[-1]), int(tokens[-1])) == OVER


def said(trie: Trie, state: int = 0, so_far: tuple = ()) -> list[tuple]:
    """Everything that may be said, to the stop token."""
    if state == OVER:
        return [so_far]
    return list(itertools.chain(*(said(trie, trie.follow(state, t), (*so_far, t)) for t in trie.allowed(state).tolist())))


@given(answers)
@settings(deadline=None)
def test_what_may_be_said_is_what_was_given(given_):
    trie = Trie.of(given_, STOP)
    expected = {(*answer, stop) for answer in given_ for stop in STOP}
    assert sorted(said(trie)) == sorted(expected)
    assert trie.longest == max(map(len, expected))
    for tokens in expected:
        assert takes(trie, tokens)
        assert not takes(trie, (*tokens, 1))
        assert not takes(trie, (7, *tokens))


@given(st.sets(st.integers(3, 40), min_size=1, max_size=4), st.integers(1, 3))
def test_repeated_answers_are_counted(firsts, repeat):
    given_ = [(first, 50, 51 + first % 2) for first in firsts]
    trie = Trie.of(given_, (1,), repeat)
    assert sorted(said(trie)) == sorted((*itertools.chain(*some), 1) for some in itertools.product(given_, repeat=repeat))
    assert trie.longest == 3 * repeat + 1


def test_it_is_the_same_when_read_again(tmp_path):
    trie = Trie.of([(3, 4), (3, 5, 6)], STOP)
    trie.save(str(tmp_path / "t.npz"))
    again = Trie.load(str(tmp_path / "t.npz"))
    assert all(np.array_equal(getattr(trie, name), getattr(again, name)) for name in ("starts", "tokens", "states", "longest"))
    assert trie.fingerprint() == again.fingerprint() != Trie.of([(3, 4)], STOP).fingerprint()


@pytest.mark.parametrize(
    ("wrong", "repeat", "said"),
    [([], 1, "no allowed answers"), ([(3,), ()], 1, "empty"), ([(3, 2, 4)], 1, "stop token"), ([(3,), (3, 4)], 2, "begins with another")],
)
def test_what_cannot_be_answers_is_refused(wrong, repeat, said):
    with pytest.raises(UserError, match=said):
        Trie.of(wrong, STOP, repeat)
