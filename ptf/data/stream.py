"""Streams: endless iterators that can be saved between any two items. The protocol, and the two that know nothing of data: Map and Shuffle.

The one idea: items never change once made, so a state may simply hold on to them (`Later`); they are written out (`settle`) only when a
checkpoint is really taken, and taking a state with every training step costs microseconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)


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


class Map(Generic[T, U]):
    """Stream[U]: f of every item. f must be a pure function."""

    def __init__(self, stream: Stream[T], f: Callable[[T], U]):
        self._stream, self._f = stream, f

    def __next__(self) -> U:
        return self._f(next(self._stream))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)


class Shuffle(Generic[T]):
    """Stream[T]: draws from a window that the stream below refills. An epoch is emptied from the window before the next one enters it,
    so no item comes a second time before every other has come once."""

    def __init__(
        self, stream: Stream[T], window: int, key: str, epoch: Callable[[], int],
        dump: Callable[[Sequence[T]], Any], load: Callable[[Any], Sequence[T]],
    ):  # fmt: skip
        """`key` names the randomness, `epoch()` the epoch of the item that came last from `stream`; `dump` and `load` write a window of items."""
        self._stream, self._size, self._key, self._epoch_of, self._dump, self._load = stream, window, key, epoch, dump, load
        self._window: list[T] = []
        self._next: list[T] = []  # at most one item, the first of the next epoch
        self._epoch = 0
        self._draws = 0

    def __next__(self) -> T:
        if not self._window:
            self._window, self._next = self._next or [next(self._stream)], []
            self._epoch = self._epoch_of()
        while not self._next and len(self._window) < max(1, self._size):
            self._take()
        i = randint(self._key, self._draws, len(self._window))
        self._draws += 1
        self._window[i], self._window[-1] = self._window[-1], self._window[i]
        return self._window.pop()

    def _take(self) -> None:
        item = next(self._stream)
        (self._window if self._epoch_of() == self._epoch else self._next).append(item)

    def passes(self) -> int:
        """Epochs of which every item has been yielded; it may have to look at the item after the last."""
        if self._draws and not self._window and not self._next:
            self._take()
        return self._epoch + 1 if self._next and not self._window else self._epoch

    def state_dict(self) -> dict[str, Any]:
        return {
            "draws": self._draws, "epoch": self._epoch, "window": Later(tuple(self._window), self._dump),
            "next": Later(tuple(self._next), self._dump), "stream": self._stream.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws, self._epoch = int(state["draws"]), int(state["epoch"])
        self._window, self._next = list(self._load(state["window"])), list(self._load(state["next"]))
        self._stream.load_state_dict(state["stream"])
