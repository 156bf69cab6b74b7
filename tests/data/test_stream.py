from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.stream import Shuffle, settle


class Epochs:
    """0 … n - 1, again and again, as (epoch, number)."""

    def __init__(self, n: int):
        self.n, self.at = n, 0

    def __next__(self) -> tuple[int, int]:
        self.at += 1
        return (self.at - 1) // self.n, (self.at - 1) % self.n

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def shuffled(n: int, window: int, key: str = "k") -> Shuffle:
    stream = Epochs(n)
    return Shuffle(stream, window, key, lambda item: item[0], list, list)


def take(stream: Any, n: int) -> list[Any]:
    return [next(stream) for _ in range(n)]


@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 4))
def test_shuffle_yields_every_item_of_an_epoch_before_any_of_the_next(n: int, window: int, epochs: int) -> None:
    items = take(shuffled(n, window), n * epochs)
    for e in range(epochs):
        assert Counter(items[e * n : (e + 1) * n]) == Counter((e, i) for i in range(n))


def test_shuffle_shuffles_by_its_key_and_by_epoch() -> None:
    a, b = take(shuffled(100, 100), 200), take(shuffled(100, 100, "another"), 100)
    first, second = [i for _, i in a[:100]], [i for _, i in a[100:]]
    assert first != sorted(first)
    assert first != second
    assert first != [i for _, i in b]
    assert take(shuffled(100, 0), 100) == [(0, i) for i in range(100)]  # no window keeps the order
    moved = np.abs(np.array(first) - np.arange(100)).mean()
    assert 25 < moved < 42  # a uniform permutation moves an item by 33 places


def test_states_hold_plain_values_only() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        return isinstance(value, int | float | str | np.ndarray) or (
            isinstance(value, list | tuple) and all(map(plain, value))
        )

    stream = shuffled(10, 5)
    take(stream, 3)
    assert plain(settle(stream.state_dict()))
    assert not plain(stream.state_dict())  # until it is settled


@pytest.mark.parametrize("window", [1, 8])
def test_state_is_of_the_moment_it_was_taken(window: int) -> None:
    stream = shuffled(50, window)
    take(stream, 10)
    state = stream.state_dict()
    after = take(stream, 30)  # moves on before the state is written out
    other = shuffled(50, window)
    other.load_state_dict(settle(state))
    assert take(other, 30) == after


def test_a_key_orders_items_as_it_always_has() -> None:
    """A run that is resumed by a later version reads on where it was: the order that a key gives is a format."""
    assert [i for _, i in take(shuffled(12, 4), 12)] == [1, 4, 5, 6, 2, 3, 7, 9, 8, 10, 0, 11]
