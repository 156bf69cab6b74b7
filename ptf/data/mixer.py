"""A weighted mixture of streams.

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

    def passes(self) -> int:
        """How often everything in it has been yielded."""
        ...


class Mixer(Generic[T]):
    """Stream[T]. Shares are proportional to weight^(1 / temperature), of samples or of whatever `size` measures. When a stream has had its `epochs`,
    `drop` goes on with the others, in their proportions, until all have; `stop` ends the mixture; `repeat` goes on with it too, until all have."""

    def __init__(
        self, streams: Mapping[str, Passing[T]], weights: Mapping[str, float], *, temperature: float = 1.0, size: Callable[[T], int] | None = None,
        exhausted: Literal["repeat", "drop", "stop"] = "repeat", epochs: Mapping[str, int | None] | None = None,
    ):  # fmt: skip
        """`epochs`: passes over each stream, None (or no such name) being endless."""
        self._streams, self._size, self._exhausted, self._epochs = dict(streams), size, exhausted, epochs or {}
        self._shares = {name: weights[name] ** (1 / temperature) for name in streams}
        self._ended: set[str] = set()
        self.taken = dict.fromkeys(streams, 0)

    def __next__(self) -> T:
        self._ended |= {name for name, epochs in self._epochs.items() if epochs is not None and self._streams[name].passes() >= epochs}
        left = [name for name in self._streams if name not in self._ended]
        if not left or (self._ended and self._exhausted == "stop"):
            raise StopIteration
        if self._exhausted == "repeat":
            left = list(self._streams)
        shares, n = sum(self._shares[name] for name in left), sum(self.taken[name] for name in left) + 1
        name = max(left, key=lambda name: self._shares[name] / shares * n - self.taken[name])  # ties: the first declared
        item = next(self._streams[name])
        self.taken[name] += 1 if self._size is None else self._size(item)
        return item

    def state_dict(self) -> dict[str, Any]:
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"taken": dict(self.taken), "ended": sorted(self._ended), "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = {name: int(state["taken"][name]) for name in self._streams}
        self._ended = set(state["ended"])
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
