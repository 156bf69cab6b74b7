"""Streams: endless iterators that can be saved between any two items. The protocol, random numbers by counter, and the one stream that knows nothing
of data: Shuffle.

The one idea: items never change once made, so a state may simply hold on to them (`Later`); they are written out (`settle`), as the places that they
came from, only when a checkpoint is really taken, and taking a state with every training step costs microseconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AT_ONCE = 1024  # random numbers that are made together


class Stream(Protocol[T_co]):
    """An endless, resumable iterator (a mixture with `epochs` ends, and stays ended). After
    `b.load_state_dict(settle(a.state_dict()))`, a and b yield the same items."""

    def __next__(self) -> T_co: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Later:
    """A part of a state that `settle` writes out."""

    items: Sequence[Any]
    dump: Callable[[Sequence[Any]], Any]


def settle(state: Any) -> Any:
    """The state in ints, floats, strings, lists, dicts and numpy arrays only."""
    if isinstance(state, Later):
        return state.dump(state.items)
    if isinstance(state, dict):
        return {key: settle(value) for key, value in state.items()}
    return state


def randint(key: str, counter: int, n: int) -> int:
    """A number below n that depends on nothing but its arguments."""
    digest = hashlib.blake2b(counter.to_bytes(8, "little"), key=hashlib.sha256(key.encode()).digest(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def _bits(key: str, counter: int, n: int) -> np.ndarray:
    """n numbers of 64 bits. Philox's raw output is the same in every version of numpy, which that of Generator's methods need not be."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.random.Philox(key=seed, counter=counter << 64).random_raw(n)


def permutation(key: str, n: int) -> np.ndarray:
    """0 … n - 1 in an order that depends on `key` alone. [n] int64"""
    return np.argsort(_bits(key, 0, n), kind="stable")


class Draws:
    """Random numbers below 2⁶⁴ by their number: each depends on the key and its number alone."""

    def __init__(self, key: str):
        self._key, self._chunk, self._values = key, -1, [0]

    def __call__(self, number: int) -> int:
        chunk, i = divmod(number, AT_ONCE)
        if chunk != self._chunk:
            self._chunk, self._values = chunk, _bits(self._key, chunk, AT_ONCE).tolist()
        return self._values[i]


class Shuffle(Generic[T]):
    """Stream[T]: draws from a window that the stream below refills. An epoch is emptied from the window before the next one enters it,
    so no item comes a second time before every other has come once. Ends when the stream below has and the window is empty."""

    def __init__(
        self, stream: Stream[T], window: int, key: str, epoch: Callable[[T], int],
        dump: Callable[[Sequence[T]], Any], load: Callable[[Any], Sequence[T]],
    ):  # fmt: skip
        """`key` names the randomness, `epoch(item)` is the item's; `dump` and `load` write a window of items."""
        self._stream, self._size, self._key, self._epoch_of, self._dump, self._load = stream, max(1, window), key, epoch, dump, load
        self._draw = Draws(key)
        self._window: list[T] = []
        self._next: list[T] = []  # at most one item, the first of a later epoch
        self._epoch = 0
        self._draws = 0
        self._ended = False

    def __next__(self) -> T:
        window = self._window
        if not window:
            if not self._look_ahead():
                raise StopIteration
            window.append(self._next.pop())
            self._epoch = self._epoch_of(window[0])
        while not self._next and len(window) < self._size and self._take():
            pass
        i = self._draw(self._draws) % len(window)
        self._draws += 1
        window[i], window[-1] = window[-1], window[i]
        return window.pop()

    def _take(self) -> bool:
        """One more item into the window, or beside it if it is of a later epoch; False if the stream below has ended."""
        if self._ended:
            return False
        try:
            item = next(self._stream)
        except StopIteration:
            self._ended = True
            return False
        (self._window if self._epoch_of(item) == self._epoch else self._next).append(item)
        return True

    def _look_ahead(self) -> bool:
        """With an empty window: whether there is another item, which is then in `_next`."""
        if not self._next and self._take() and self._window:
            self._next.append(self._window.pop())
        return bool(self._next)

    def passes(self) -> int | None:
        """Epochs of which every item has been yielded; None if no item will ever come again. It may have to look at the item that follows."""
        if self._window:
            return self._epoch
        return self._epoch_of(self._next[0]) if self._look_ahead() else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "draws": self._draws, "epoch": self._epoch, "ended": self._ended, "window": Later(tuple(self._window), self._dump),
            "next": Later(tuple(self._next), self._dump), "stream": self._stream.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._draws, self._epoch, self._ended = int(state["draws"]), int(state["epoch"]), bool(state["ended"])
        self._window, self._next = list(self._load(state["window"])), list(self._load(state["next"]))
