"""A partition of the data: a mixture of its sources, as a stream of packed sequences.

A partition is a pure function of (config, files, partition number), so whichever process serves it, from whatever
state, yields the same sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ptf.data.encode import COUNTS
from ptf.data.encoded import Encoded
from ptf.data.order import ORDER, raise_if_other_order
from ptf.data.packing import Packer
from ptf.data.sample import PackUnit
from ptf.data.stream import Stream
from ptf.data.stream_unit import StreamUnit


class Partition(Iterator[list[PackUnit]]):
    """Stream[list[PackUnit]]: a partition's packed sequences, and what its encoders counted."""

    def __init__(self, encoded: Mapping[str, Encoded], items: Stream[StreamUnit], seq_len: int, lookahead: int):
        """Make the partition: `items` mixes the sources' `encoded` streams, each of them shuffled."""
        self._encoded, self._names = encoded, list(encoded)
        self._packer = Packer(items, seq_len, lookahead, attrgetter("length"), self._dump, self._load)
        # rows of each source in the packed sequences so far; not part of the state
        self.passed = dict.fromkeys(encoded, 0.0)

    def __next__(self) -> list[PackUnit]:
        sequence, passed = next(self._packer), self.passed
        for item in sequence:
            passed[item.source] += item.rows
        return [item.unit for item in sequence]

    def counts(self) -> Mapping[str, int]:
        """Return the encoders' counts after the sequences that were taken, summed over sources."""
        each = [encoded.encoder.counts for encoded in self._encoded.values()]
        return each[0] if len(each) == 1 else {key: sum(counts[key] for counts in each) for key in COUNTS}

    def _dump(self, items: Sequence[StreamUnit]) -> dict[str, Any]:
        places = {
            name: encoded.dump([item for item in items if item.source == name])
            for name, encoded in self._encoded.items()
        }
        return {"sources": [self._names.index(item.source) for item in items], "places": places}

    def _load(self, state: Mapping[str, Any]) -> list[StreamUnit]:
        items = {name: iter(encoded.load(state["places"][name])) for name, encoded in self._encoded.items()}
        return [next(items[self._names[i]]) for i in state["sources"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last stream unit; `settle` finishes it."""
        return {"order": ORDER, **self._packer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        raise_if_other_order(state)
        self._packer.load_state_dict(state)
