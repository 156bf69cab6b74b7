"""Streams: endless iterators whose state can be saved between any two items. This file has the protocol, random numbers
by counter, and the only stream that does not depend on the kind of data: Shuffle.

Items are immutable, so a state may hold references to them (`Deferred`). They are converted to values for a checkpoint
only when a checkpoint is saved (`settle`), so that taking a state at every training step costs microseconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
NUMBERS_AT_ONCE = 1024  # random numbers that are computed at once


class Stream(Protocol[T_co]):
    """A resumable iterator, endless unless its data are read a limited number of times; one that has ended stays so.

    After `b.load_state_dict(settle(a.state_dict()))`, a and b yield the same items.
    """

    def __next__(self) -> T_co:
        """Return the next item."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item; `settle` converts it to values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class Deferred(NamedTuple):
    """Part of a state that `settle` replaces by `dump(items)`."""

    items: Sequence[Any]
    dump: Callable[[Sequence[Any]], Any]


def settle(state: Any) -> Any:
    """Return the state as ints, floats, strings, lists, dicts and numpy arrays: every Deferred part is converted."""
    if isinstance(state, Deferred):
        return settle(state.dump(state.items))
    if isinstance(state, dict):
        return {key: settle(value) for key, value in state.items()}
    return state


def randint(key: str, counter: int, n: int) -> int:
    """Return a random number below n that depends only on the arguments."""
    digest = hashlib.blake2b(
        counter.to_bytes(8, "little"), key=hashlib.sha256(key.encode()).digest(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") % n


def _bits(key: str, counter: int, n: int) -> np.ndarray:
    """Return n random numbers of 64 bits.

    Philox's raw output is the same in every version of numpy; the output of Generator's methods may change.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.random.Philox(key=seed, counter=counter << 64).random_raw(n)


def permutation(key: str, n: int) -> np.ndarray:
    """Return 0 … n - 1 in a random order that depends only on `key` and n, [n] int64."""
    return np.argsort(_bits(key, 0, n), kind="stable")


@dataclass
class Draws:
    """Random numbers below 2⁶⁴ by index: each depends only on the key and its index."""

    key: str
    _chunk: int = -1  # the one that was computed last, and its numbers
    _numbers: Sequence[int] = ()

    def __call__(self, number: int) -> int:
        """Return the random number at index `number`."""
        chunk, i = divmod(number, NUMBERS_AT_ONCE)
        if chunk != self._chunk:
            self._chunk, self._numbers = chunk, _bits(self.key, chunk, NUMBERS_AT_ONCE).tolist()
        return self._numbers[i]


class Shuffle(Generic[T]):
    """Stream[T]: draws items at random from a window that is refilled from the stream below.

    Items of an epoch enter the window only when it has no items of the epoch before, so no item is repeated before
    every other item has been drawn once. The stream ends when the stream below has ended and the window is empty.
    """

    def __init__(
        self,
        stream: Stream[T],
        window: int,
        key: str,
        epoch: Callable[[T], int],
        dump: Callable[[Sequence[T]], Any],
        load: Callable[[Any], Sequence[T]],
    ):
        """Make a shuffle of `stream`.

        `key` is the key of the random numbers; `epoch` returns an item's epoch; `dump` and `load` convert the items of
        a window to values for a state, and back.
        """
        self._stream, self._size = stream, max(1, window)
        self._epoch_of, self._dump, self._load = epoch, dump, load
        self._draw = Draws(key)
        self._window: list[T] = []
        self._next: list[T] = []  # at most one item: the first of the next epoch
        self._epoch = 0
        self._draws = 0
        self._ended = False

    def __next__(self) -> T:
        if not self._window:
            if not self._find_next():
                raise StopIteration
            self._window.append(self._next.pop())
            self._epoch = self._epoch_of(self._window[0])
        window = self._window
        while not self._next and len(window) < self._size and self._take():
            pass
        i = self._draw(self._draws) % len(window)
        self._draws += 1
        window[i], window[-1] = window[-1], window[i]
        return window.pop()

    def _take(self) -> bool:
        """Move one more item to the window, or to `_next` if it is of a later epoch.

        Return False if the stream below has ended.
        """
        if self._ended:
            return False
        try:
            item = next(self._stream)
        except StopIteration:
            self._ended = True
            return False
        (self._window if self._epoch_of(item) == self._epoch else self._next).append(item)
        return True

    def _find_next(self) -> bool:
        """Return whether there is another item, and put it in `_next`. The window must be empty."""
        if not self._next and self._take() and self._window:
            self._next.append(self._window.pop())
        return bool(self._next)

    def passes(self) -> int | None:
        """Return the number of epochs of which every item has been yielded; None if the stream has no more items.

        This may read the next item.
        """
        if self._window:
            return self._epoch
        return self._epoch_of(self._next[0]) if self._find_next() else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item; `settle` converts it to values."""
        return {
            "draws": self._draws,
            "epoch": self._epoch,
            "ended": self._ended,
            "window": Deferred(tuple(self._window), self._dump),
            "next": Deferred(tuple(self._next), self._dump),
            "stream": self._stream.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._stream.load_state_dict(state["stream"])
        self._draws, self._epoch, self._ended = int(state["draws"]), int(state["epoch"]), bool(state["ended"])
        self._window, self._next = list(self._load(state["window"])), list(self._load(state["next"]))
