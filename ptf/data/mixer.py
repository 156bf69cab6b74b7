"""A mixture of streams by shares.

The one idea: no randomness. The next sample comes from the stream that is furthest behind its share, so at any time each stream has given its share
to within a sample, and the counts are the whole state.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

from ptf.data.stream import Stream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Passing(Stream[T_co], Protocol[T_co]):
    """An endless stream that knows when it begins anew."""

    @property
    def sure(self) -> int:
        """How many items may be taken before `passes` can be another."""
        ...

    def passes(self) -> int | None:
        """How often everything in it has been yielded; None if nothing will ever come again."""
        ...


class Mixer(Generic[T]):
    """Stream[T]. Shares are of samples or of whatever `size` measures. When a stream has had its `epochs`, `drop` goes on with the others, in their
    proportions, until all have; `stop` ends the mixture; `repeat` goes on with it too, until all have. A stream that has nothing more is left out."""

    def __init__(
        self, streams: Mapping[str, Passing[T]], shares: Mapping[str, float], *, size: Callable[[T], float] | None = None,
        exhausted: Literal["repeat", "drop", "stop"] = "repeat", epochs: Mapping[str, int | None] | None = None, ahead: Mapping[str, float] | None = None,
    ):  # fmt: skip
        """`epochs`: passes over each stream, None (or no such name) being endless. `ahead`: how far each is behind its share at the start, below 1:
        mixtures that are read side by side then do not all come to a rare stream at the same time."""
        self._streams, self._size, self._exhausted, self._epochs = dict(streams), size, exhausted, epochs or {}
        self._shares = {name: shares[name] for name in streams}
        self._ahead = ahead or dict.fromkeys(streams, 0.0)
        self._ended: set[str] = set()  # had their epochs
        self._empty: set[str] = set()  # have nothing more
        self.taken: dict[str, float] = dict.fromkeys(streams, 0)
        self._begin()

    def _begin(self) -> None:
        self._left = self._open()
        self._moved = list(self._streams)  # since it was looked at how often they have passed
        self._sure = 0  # items that may be taken without a look, of the only stream that is left

    def __next__(self) -> T:
        if self._sure:
            self._sure -= 1
            return self._take(self._left[0])
        self._look()
        left = self._left
        if len(left) == 1:
            item = self._take(left[0])
            self._moved, self._sure = left, self._streams[left[0]].sure
            return item
        if left:
            shares, n = sum(self._shares[name] for name in left), sum(self.taken[name] for name in left) + 1
            name = max(left, key=lambda name: self._shares[name] / shares * n + self._ahead[name] - self.taken[name])  # ties: the first declared
        else:
            raise StopIteration
        self._moved = [name]
        return self._take(name)

    def _take(self, name: str) -> T:
        item = next(self._streams[name])
        self.taken[name] += 1 if self._size is None else self._size(item)
        return item

    def _look(self) -> None:
        """Whether a stream of which something was taken has had its epochs, or has nothing more; and which are left to take from."""
        for name in self._moved:
            if name not in self._empty:
                passes, epochs = self._streams[name].passes(), self._epochs.get(name)
                if passes is None or (epochs is not None and passes >= epochs):
                    self._ended.add(name)
                    if passes is None:
                        self._empty.add(name)
                    self._left = self._open()
        self._moved = []

    def _open(self) -> list[str]:
        """The streams that may be taken from; none where the mixture has ended."""
        left = [name for name in self._streams if name not in self._ended]
        if not left or (self._exhausted == "stop" and self._ended - self._empty):
            return []
        return [name for name in self._streams if name not in self._empty] if self._exhausted == "repeat" else left

    def state_dict(self) -> dict[str, Any]:
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"taken": dict(self.taken), "ended": sorted(self._ended), "empty": sorted(self._empty), "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = {name: float(state["taken"][name]) for name in self._streams}
        self._ended, self._empty = set(state["ended"]), set(state["empty"])
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
        self._begin()
