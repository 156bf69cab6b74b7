"""A weighted mixture of streams.

The one idea: no randomness. The next sample comes from the stream that is furthest behind its share, so after n samples each stream has
given its share of n to within a few samples, and the counts are the whole state.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from ptf.data.stream import Stream

T = TypeVar("T")


class Mixer(Generic[T]):
    """Stream[T]. Shares are of samples, relative to the sum of the weights."""

    def __init__(self, streams: Mapping[str, Stream[T]], weights: Mapping[str, float]):
        total = sum(weights[name] for name in streams)
        self._streams = dict(streams)
        self._shares = {name: weights[name] / total for name in streams}
        self.taken = dict.fromkeys(streams, 0)

    def __next__(self) -> T:
        n = sum(self.taken.values()) + 1
        name = max(self._shares, key=lambda name: self._shares[name] * n - self.taken[name])  # ties: the first declared
        item = next(self._streams[name])
        self.taken[name] += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self.taken), "streams": {name: stream.state_dict() for name, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = {name: int(state["taken"][name]) for name in self._streams}
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
