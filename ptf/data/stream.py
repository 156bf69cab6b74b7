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
DRAWS_AT_ONCE = 1024  # draws that a shuffle does at once


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


class Draws:
    """Random numbers below 2⁶⁴ by index: each depends only on the key and its index."""

    def __init__(self, key: str):
        self._key = key
        self._chunks: dict[int, np.ndarray] = {}  # the two chunks that were computed last
        self._list_of, self._list = -1, [0]  # the number of one chunk, and its values as Python ints

    def __call__(self, number: int) -> int:
        """Return the random number at index `number`."""
        chunk, i = divmod(number, NUMBERS_AT_ONCE)
        if chunk != self._list_of:
            self._list_of, self._list = chunk, self._chunk(chunk).tolist()
        return self._list[i]

    def _chunk(self, chunk: int) -> np.ndarray:
        values = self._chunks.get(chunk)
        if values is None:
            values = _bits(self._key, chunk, NUMBERS_AT_ONCE)
            self._chunks = {**dict(list(self._chunks.items())[-1:]), chunk: values}
        return values

    def numbers(self, first: int, n: int) -> np.ndarray:
        """Return n numbers from index `first` on, [n] uint64."""
        parts = []
        while n:
            chunk, i = divmod(first, NUMBERS_AT_ONCE)
            parts.append(self._chunk(chunk)[i : i + n])
            first, n = first + len(parts[-1]), n - len(parts[-1])
        return np.concatenate(parts) if len(parts) != 1 else parts[0]


class StreamRun(Protocol[T_co]):
    """Items of one epoch that were taken from a stream at once, and the stream's state after any of them."""

    @property
    def items(self) -> Sequence[T_co]:
        """The items, in order."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of all items."""
        ...

    def state(self, n: int) -> dict[str, Any]:
        """Return the stream's state after the first n items; `settle` converts it to values."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _DrawBatch(Generic[T]):
    """Draws that are done at once, with the values needed to recover the window after any of them."""

    window: Sequence[T]  # the full window before the first draw
    draws: Sequence[int]  # the index that each draw takes from the window
    more: Sequence[T]  # one enters the window before each draw but the first
    number: int  # the number of the first draw
    taken: int  # items of the run that were taken before the first draw

    def drawn(self, n: int) -> tuple[list[T], list[T]]:
        """Return the items of the first n draws, n > 0, and the window after them."""
        window, items = list(self.window), []
        for i, item in zip(self.draws[: n - 1], self.more, strict=False):
            items.append(window[i])
            window[i], window[-1] = window[-1], item
        i = self.draws[n - 1]
        items.append(window[i])
        window[i] = window[-1]
        window.pop()
        return items, window


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
        self._stream, self._size, self._key = stream, max(1, window), key
        self._epoch_of, self._dump, self._load = epoch, dump, load
        self._draw = Draws(key)
        self._window: list[T] = []
        self._next: list[T] = []  # at most one item: the first of the next epoch
        self._epoch = 0
        self._draws = 0
        self._ended = False
        self._runs: Callable[[int], StreamRun[T] | None] = getattr(stream, "run", lambda most: None)
        self._reset()

    def _reset(self) -> None:
        self._run: StreamRun[T] | None = None  # the next items of the stream below, from number `_at` on
        self._at = 0
        self._batch: _DrawBatch[T] | None = None
        self._out: list[T] = []  # items that are drawn but not yet yielded, in reverse order

    def __next__(self) -> T:
        if self._out:
            return self._out.pop()
        if not self._window:
            if not self._find_next():
                raise StopIteration
            self._window.append(self._next.pop())
            self._epoch = self._epoch_of(self._window[0])
        if not self._next and self._draw_many():
            return self._out.pop()
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

    def _draw_many(self) -> bool:
        """Draw many items at once if the stream below has a run of the window's epoch; return whether it did."""
        while not self._ended and (run := self._current()) is not None and run.epoch == self._epoch:
            start, full = self._at, self._at + self._size - len(self._window)
            self._window += run.items[start:full]
            if full > len(run.items):
                self._at = len(run.items)
                continue
            more = run.items[full : full + DRAWS_AT_ONCE]
            draws = (self._draw.numbers(self._draws, len(more) + 1) % np.uint64(self._size)).tolist()
            self._batch = _DrawBatch(self._window, draws, more, self._draws, full)
            items, self._window = self._batch.drawn(len(draws))
            self._out = items[::-1]
            self._draws += len(draws)
            self._at = full + len(more)
            return True
        return False

    def _current(self) -> StreamRun[T] | None:
        """Return a run that has items left; None if the stream below gives no runs now."""
        while self._run is None or self._at == len(self._run.items):
            run = self._runs(self._size - len(self._window) + DRAWS_AT_ONCE)
            if run is None:
                return None
            self._run, self._at = run, 0
        return self._run

    def _find_next(self) -> bool:
        """Return whether there is another item, and put it in `_next`. The window must be empty."""
        if not self._next and self._take() and self._window:
            self._next.append(self._window.pop())
        return bool(self._next)

    @property
    def ready(self) -> list[T]:
        """Items that are drawn already, in reverse order.

        A consumer takes an item with `__next__`, or pops it off this list. `passes` does not change until it is empty.
        """
        return self._out

    def passes(self) -> int | None:
        """Return the number of epochs of which every item has been yielded; None if the stream has no more items.

        This may read the next item.
        """
        if self._out or self._window:
            return self._epoch
        return self._epoch_of(self._next[0]) if self._find_next() else None

    @property
    def position(self) -> tuple[StreamRun[T] | None, int]:
        """The run of the stream below that is being read, and how many of its items were used for the items yielded."""
        if self._out:
            assert self._batch is not None
            return self._run, self._batch.taken + len(self._batch.draws) - len(self._out) - 1
        return self._run, self._at

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item; `settle` converts it to values."""
        if self._out:
            assert self._batch is not None
            n = len(self._batch.draws) - len(self._out)
            draws, window = self._batch.number + n, Deferred((self._batch, n), self._dump_batch)
        else:
            draws, window = self._draws, Deferred(tuple(self._window), self._dump)
        run, at = self.position
        return {
            "draws": draws,
            "epoch": self._epoch,
            "ended": self._ended,
            "window": window,
            "next": Deferred(tuple(self._next), self._dump),
            "stream": self._stream.state_dict() if run is None else Deferred((run, at), _state_in),
        }

    def _dump_batch(self, batch_and_count: Sequence[Any]) -> Any:
        batch, n = batch_and_count
        return self._dump(batch.drawn(n)[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._reset()
        self._stream.load_state_dict(state["stream"])
        self._draws, self._epoch, self._ended = int(state["draws"]), int(state["epoch"]), bool(state["ended"])
        self._window, self._next = list(self._load(state["window"])), list(self._load(state["next"]))


def _state_in(run_and_count: Sequence[Any]) -> dict[str, Any]:
    """Return the stream's state after the first n items of a run."""
    run, n = run_and_count
    return run.state(n)
