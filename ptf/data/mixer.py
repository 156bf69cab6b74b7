"""A mixture of streams by shares.

The mixture is not random. The next sample is taken from the stream that is furthest below its share. At any time each
stream has contributed its share to within one sample, and the counts are the mixture's whole state.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any, Generic, Literal, Protocol, TypeVar

from ptf.data.stream import Stream

T = TypeVar("T")


class EpochStream(Stream[T], Protocol[T]):
    """An endless stream that counts its epochs."""

    @property
    def ready(self) -> list[T]:
        """The next items, in reverse order; `passes` does not change until they are taken.

        A consumer takes an item by popping it off this list.
        """
        ...

    def passes(self) -> int | None:
        """Return how often every item has been yielded; None if the stream has no more items."""
        ...


class Mixer(Generic[T]):
    """Stream[T]: a mixture of streams by shares, which are counted in samples or, with `size`, in units of `size`.

    `exhausted` is what happens when a stream has yielded its `epochs`: `drop` continues with the other streams, in
    proportion to their shares, until all have yielded theirs; `repeat` continues with all streams until then; `stop`
    ends the mixture. A stream that has no more items is not used further.
    """

    def __init__(
        self,
        streams: Mapping[str, EpochStream[T]],
        shares: Mapping[str, float],
        *,
        size: Callable[[T], float] | None = None,
        exhausted: Literal["repeat", "drop", "stop"] = "repeat",
        epochs: Mapping[str, int | None] | None = None,
        initial_deficits: Mapping[str, float] | None = None,
    ):
        """Make a mixture.

        `epochs` is the number of passes over each stream; without an entry, or with None, it is endless.
        `initial_deficits` is how far each stream is below its share at the start, less than 1: with different values,
        mixtures that are read in parallel do not all take from a rare stream at the same time.
        """
        self._streams, self._size = dict(streams), size
        self._exhausted, self._epochs = exhausted, epochs or {}
        self._shares = {name: shares[name] for name in streams}
        self._deficits = initial_deficits or dict.fromkeys(streams, 0.0)
        self._ended: set[str] = set()  # streams that have yielded their epochs
        self._empty: set[str] = set()  # streams that have no more items
        self._taken: dict[str, float] = dict.fromkeys(streams, 0)
        self._reset()

    def _reset(self) -> None:
        self._left = self._open()
        self._changed = list(self._streams)  # streams from which an item was taken since the last `_update`
        self.ready: list[T] = []
        """Items of the only stream that is left, in reverse order. A consumer takes an item by popping it off this list
        or with `__next__`."""
        self._uncounted: list[T] = []  # the items of `ready` when they were last counted

    def __next__(self) -> T:
        if self.ready:
            return self.ready.pop()
        self._count()
        self._update()
        left = self._left
        if len(left) == 1:
            item = self._take(left[0])
            self._changed, self.ready = left, self._streams[left[0]].ready
            self._uncounted = self.ready.copy()
            return item
        if left:
            shares, n = sum(self._shares[name] for name in left), sum(self._taken[name] for name in left) + 1
            # of equals, the first stream in the config is chosen
            name = max(
                left, key=lambda name: self._shares[name] / shares * n + self._deficits[name] - self._taken[name]
            )
        else:
            raise StopIteration
        self._changed = [name]
        return self._take(name)

    def _take(self, name: str) -> T:
        item = next(self._streams[name])
        self._taken[name] += 1 if self._size is None else self._size(item)
        return item

    def _count(self) -> None:
        """Count the items that were popped off `ready`, in the order in which they were taken, so that the rounding of
        the sum does not depend on when they are counted."""
        popped = self._uncounted[: len(self.ready) - 1 if self.ready else None : -1]
        del self._uncounted[len(self.ready) :]
        if popped:
            name = self._left[0]
            sizes = [1] * len(popped) if self._size is None else map(self._size, popped)
            self._taken[name] = reduce(add, sizes, self._taken[name])

    @property
    def taken(self) -> dict[str, float]:
        """The amount taken from each stream, in samples or in units of `size`."""
        self._count()
        return self._taken

    def _update(self) -> None:
        """Find out which streams have yielded their epochs or have no more items, and which are left."""
        for name in self._changed:
            if name not in self._empty:
                passes, epochs = self._streams[name].passes(), self._epochs.get(name)
                if passes is None or (epochs is not None and passes >= epochs):
                    self._ended.add(name)
                    if passes is None:
                        self._empty.add(name)
                    self._left = self._open()
        self._changed = []

    def _open(self) -> list[str]:
        """Return the streams to take items from; an empty list if the mixture has ended."""
        left = [name for name in self._streams if name not in self._ended]
        if not left or (self._exhausted == "stop" and self._ended - self._empty):
            return []
        return [name for name in self._streams if name not in self._empty] if self._exhausted == "repeat" else left

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item; `settle` converts it to values."""
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {
            "taken": dict(self.taken),
            "ended": sorted(self._ended),
            "empty": sorted(self._empty),
            "streams": streams,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._taken = {name: float(state["taken"][name]) for name in self._streams}
        self._ended, self._empty = set(state["ended"]), set(state["empty"])
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
        self._reset()
