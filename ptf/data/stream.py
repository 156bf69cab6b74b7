"""Streams: endless iterators that can be saved between any two items. The protocol, random numbers by counter, and the one stream that knows nothing
of data: Shuffle.

The one idea: items never change once made, so a state may simply hold on to them (`Later`); they are written out (`settle`), as the places that they
came from, only when a checkpoint is really taken, and taking a state with every training step costs microseconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AT_ONCE = 1024  # random numbers that are made together
AHEAD = 1024  # draws that a shuffle makes together


class Stream(Protocol[T_co]):
    """An endless, resumable iterator (a mixture with `epochs` ends, and stays ended). After
    `b.load_state_dict(settle(a.state_dict()))`, a and b yield the same items."""

    def __next__(self) -> T_co: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Later(NamedTuple):
    """A part of a state that `settle` writes out."""

    items: Sequence[Any]
    dump: Callable[[Sequence[Any]], Any]


def settle(state: Any) -> Any:
    """The state in ints, floats, strings, lists, dicts and numpy arrays only."""
    if isinstance(state, Later):
        return settle(state.dump(state.items))
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
        self._key, self._chunk, self._values = key, -1, np.zeros(1, np.uint64)
        self._list = [0]

    def __call__(self, number: int) -> int:
        chunk, i = divmod(number, AT_ONCE)
        if chunk != self._chunk:
            self._fill(chunk)
        return self._list[i]

    def _fill(self, chunk: int) -> None:
        self._chunk, self._values = chunk, _bits(self._key, chunk, AT_ONCE)
        self._list = self._values.tolist()

    def some(self, first: int, n: int) -> np.ndarray:
        """Numbers `first` to before `first` + n. [n] uint64"""
        found = []
        while n:
            chunk, i = divmod(first, AT_ONCE)
            if chunk != self._chunk:
                self._fill(chunk)
            found.append(self._values[i : i + n])
            first, n = first + len(found[-1]), n - len(found[-1])
        return np.concatenate(found) if len(found) != 1 else found[0]


class StreamRun(Protocol[T_co]):
    """Items of one epoch that were taken from a stream together, and what its state is behind any of them."""

    @property
    def items(self) -> Sequence[T_co]: ...

    @property
    def epoch(self) -> int: ...

    def state(self, n: int) -> dict[str, Any]:
        """Of the stream, behind the first n items; `settle` finishes it."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Ahead(Generic[T]):
    """Draws that are made together, and what is needed to know the window behind any of them."""

    window: Sequence[T]  # full, before the first
    draws: Sequence[int]  # places in it
    more: Sequence[T]  # one comes into the window before each draw but the first
    number: int  # of the first draw
    taken: int  # items of the run that were taken until then

    def drawn(self, n: int) -> tuple[list[T], list[T]]:
        """What the first n draws give, n > 0, and the window behind them."""
        window, found = list(self.window), []
        for i, item in zip(self.draws[: n - 1], self.more, strict=False):
            found.append(window[i])
            window[i], window[-1] = window[-1], item
        i = self.draws[n - 1]
        found.append(window[i])
        window[i] = window[-1]
        window.pop()
        return found, window


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
        self._runs: Callable[[int], StreamRun[T] | None] = getattr(stream, "run", lambda most: None)
        self._forget()

    def _forget(self) -> None:
        self._run: StreamRun[T] | None = None  # what is taken from first, from its item number `_at` on
        self._at = 0
        self._ahead: _Ahead[T] | None = None
        self._out: list[T] = []  # what was drawn ahead and is not yielded, the next one last

    def __next__(self) -> T:
        if self._out:
            return self._out.pop()
        if not self._window:
            if not self._look_ahead():
                raise StopIteration
            self._window.append(self._next.pop())
            self._epoch = self._epoch_of(self._window[0])
        if not self._next and self._draw_ahead():
            return self._out.pop()
        window = self._window
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
        run = self._current()
        if run is not None:
            item = run.items[self._at]
            self._at += 1
        else:
            self._run = None
            try:
                item = next(self._stream)
            except StopIteration:
                self._ended = True
                return False
        (self._window if self._epoch_of(item) == self._epoch else self._next).append(item)
        return True

    def _draw_ahead(self) -> bool:
        """Many draws at once, where the stream below gives many items at once and they are of the window's epoch."""
        while not self._ended and (run := self._current()) is not None and run.epoch == self._epoch:
            start, full = self._at, self._at + self._size - len(self._window)
            self._window += run.items[start:full]
            if full > len(run.items):
                self._at = len(run.items)
                continue
            more = run.items[full : full + AHEAD]
            draws = (self._draw.some(self._draws, len(more) + 1) % np.uint64(self._size)).tolist()
            self._ahead = _Ahead(self._window, draws, more, self._draws, full)
            found, self._window = self._ahead.drawn(len(draws))
            self._out, self._draws, self._at = found[::-1], self._draws + len(draws), full + len(more)
            return True
        return False

    def _current(self) -> StreamRun[T] | None:
        """A run of which something is left."""
        while self._run is None or self._at == len(self._run.items):
            run = self._runs(self._size - len(self._window) + AHEAD)
            if run is None:
                return None
            self._run, self._at = run, 0
        return self._run

    def _look_ahead(self) -> bool:
        """With an empty window: whether there is another item, which is then in `_next`."""
        if not self._next and self._take() and self._window:
            self._next.append(self._window.pop())
        return bool(self._next)

    @property
    def sure(self) -> int:
        """How many items may be taken before it has to be asked again how often it passes."""
        return len(self._out)

    def passes(self) -> int | None:
        """Epochs of which every item has been yielded; None if no item will ever come again. It may have to look at the item that follows."""
        if self._out or self._window:
            return self._epoch
        return self._epoch_of(self._next[0]) if self._look_ahead() else None

    @property
    def taken(self) -> tuple[StreamRun[T] | None, int]:
        """The run of the stream below that is being read, and how many of its items were needed so far."""
        if self._out:
            assert self._ahead is not None
            return self._run, self._ahead.taken + len(self._ahead.draws) - len(self._out) - 1
        return self._run, self._at

    def state_dict(self) -> dict[str, Any]:
        if self._out:
            assert self._ahead is not None
            n = len(self._ahead.draws) - len(self._out)
            draws, window = self._ahead.number + n, Later((self._ahead, n), self._dump_ahead)
        else:
            draws, window = self._draws, Later(tuple(self._window), self._dump)
        run, at = self.taken
        return {
            "draws": draws, "epoch": self._epoch, "ended": self._ended, "window": window, "next": Later(tuple(self._next), self._dump),
            "stream": self._stream.state_dict() if run is None else Later((run, at), _state_in),
        }  # fmt: skip

    def _dump_ahead(self, found: Sequence[Any]) -> Any:
        ahead, n = found
        return self._dump(ahead.drawn(n)[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._stream.load_state_dict(state["stream"])
        self._draws, self._epoch, self._ended = int(state["draws"]), int(state["epoch"]), bool(state["ended"])
        self._window, self._next = list(self._load(state["window"])), list(self._load(state["next"]))


def _state_in(found: Sequence[Any]) -> dict[str, Any]:
    run, n = found
    return run.state(n)
