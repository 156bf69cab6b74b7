"""A mixture of streams by shares.

The mixture is not random. The next sample is taken from the stream that is furthest below its share. At any time each
stream has contributed its share to within one sample, and the counts are the mixture's whole state.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

from ptf.data.stream import Stream, T_co

T = TypeVar("T")


class EpochStream(Stream[T_co], Protocol[T_co]):
    """An endless stream that counts its epochs."""

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
        self.taken: dict[str, float] = dict.fromkeys(streams, 0)
        """The amount taken from each stream, in samples or in units of `size`."""
        self._left = self._open()
        self._changed = list(streams)  # streams from which an item was taken since the last `_update`

    def __next__(self) -> T:
        self._update()
        left = self._left
        if not left:
            raise StopIteration
        name = left[0]
        if len(left) > 1:
            shares, n = sum(self._shares[name] for name in left), sum(self.taken[name] for name in left) + 1
            # of equals, the first stream in the config is chosen
            name = max(left, key=lambda name: self._shares[name] / shares * n + self._deficits[name] - self.taken[name])
        item = next(self._streams[name])
        self.taken[name] += 1 if self._size is None else self._size(item)
        self._changed = [name]
        return item

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
        self.taken = {name: float(state["taken"][name]) for name in self._streams}
        self._ended, self._empty = set(state["ended"]), set(state["empty"])
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
        self._left, self._changed = self._open(), list(self._streams)
