"""A trie takes exactly the answers that it was made of."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.trie import OVER, Trie, TrieCursor
from ptf.errors import UserError

STOP = (1, 2)
answers = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


def takes(trie: Trie, tokens) -> bool:
    try:
        seen = trie.walked(tokens)
    except ValueError:
        return False
    assert len(seen) == len(tokens)
    assert seen.shape == (len(tokens), trie.width)
    assert seen[0, 0] == 0
    return trie.follow(int(seen[-1, 0]), int(tokens[-1])) == OVER


def said(trie: Trie, state: int = 0, so_far: tuple = ()) -> list[tuple]:
    """Everything that may be said, to the stop token."""
    if state == OVER:
        return [so_far]
    return list(
        itertools.chain(*(said(trie, trie.follow(state, t), (*so_far, t)) for t in trie.allowed(state).tolist()))
    )


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
    assert sorted(said(trie)) == sorted(
        (*itertools.chain(*some), 1) for some in itertools.product(given_, repeat=repeat)
    )
    assert trie.longest == 3 * repeat + 1


def ways(trie: Trie, tokens: tuple = ()) -> list[tuple]:
    """Everything that may be said, found by walking."""
    walk = TrieCursor(trie)
    for token in tokens:
        walk.follow(token)
    return (
        [tokens]
        if walk.state == OVER
        else list(itertools.chain(*(ways(trie, (*tokens, t)) for t in walk.allowed().tolist())))
    )


@given(
    st.sets(st.sampled_from([(3,), (4, 3), (4, 5), (6, 3, 3), (6, 3, 4), (6, 4, 5), (5, 6)]), min_size=3, max_size=5),
    st.integers(2, 3),
)
@settings(deadline=None, max_examples=30)
def test_distinct_answers_are_said_once(given_, repeat):
    trie = Trie.of(given_, (1,), repeat, distinct=True)
    expected = sorted((*itertools.chain(*some), 1) for some in itertools.permutations(given_, repeat))
    assert sorted(ways(trie)) == expected
    for tokens in expected:
        assert takes(trie, tokens)
    for some in itertools.product(given_, repeat=repeat):
        assert takes(trie, (*itertools.chain(*some), 1)) == (len(set(some)) == repeat)
    places = trie.walked(expected[0])
    walk = TrieCursor(trie)
    for token, (state, *taken) in zip(expected[0], places.tolist(), strict=True):
        assert walk.allowed().tolist() == sorted(set(trie.allowed(state).tolist()) - set(taken))
        walk.follow(token)


def test_it_is_the_same_when_read_again(tmp_path):
    trie = Trie.of([(3, 4), (3, 5, 6), (4,)], STOP, 2, distinct=True)
    trie.save(str(tmp_path / "t.npz"))
    again = Trie.load(str(tmp_path / "t.npz"))
    assert all(
        np.array_equal(getattr(trie, name), getattr(again, name))
        for name in ("starts", "tokens", "next_states", "longest", "repeat", "under", "width")
    )
    assert trie.fingerprint() == again.fingerprint() != Trie.of([(3, 4), (3, 5, 6), (4,)], STOP, 2).fingerprint()


@pytest.mark.parametrize(
    ("wrong", "repeat", "said"),
    [
        ([], 1, "no allowed responses"),
        ([(3,), ()], 1, "empty"),
        ([(3, 2, 4)], 1, "stop token"),
        ([(3,), (3, 4)], 2, "begins with another"),
    ],
)
def test_what_cannot_be_answers_is_refused(wrong, repeat, said):
    with pytest.raises(UserError, match=said):
        Trie.of(wrong, STOP, repeat)


def test_too_few_answers_to_be_distinct_are_refused():
    with pytest.raises(UserError, match="has 2 different lines; distinct: true with lines_per_response: 3"):
        Trie.of([(3,), (4,)], STOP, 3, distinct=True)


def test_only_answers_that_exclude_each_other_need_more_than_a_state():
    lines = [[1, 2], [3]]
    assert Trie.of(lines, [0], repeat=2).width == 1
    assert len(Trie.of(lines, [0], repeat=2).under) == 0
    assert Trie.of(lines, [0], repeat=2, distinct=True).width == 2
