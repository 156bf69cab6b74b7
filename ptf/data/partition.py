"""A partition of the data: a mixture of its sources, as a stream of packed sequences.

A partition is a pure function of (config, files, partition number), so whichever process serves it, from whatever
state, yields the same sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ptf.data.encode import COUNTS
from ptf.data.encoded import Encoded
from ptf.data.order import ORDER, raise_if_other_order
from ptf.data.packing import Packer
from ptf.data.sample import PackUnit
from ptf.data.stream import Shuffle, Stream
from ptf.data.stream_units import ROWS, SOURCE, StreamUnit, length_of, units_of
from ptf.data.unit_block import UnitBlock


class Partition:
    """Stream[list[PackUnit]]: a partition's packed sequences, and what its encoders counted."""

    def __init__(
        self,
        encoded: Mapping[str, Encoded],
        shuffled: Mapping[str, Shuffle[StreamUnit]],
        items: Stream[StreamUnit],
        seq_len: int,
        lookahead: int,
    ):
        """Make the partition: `items` mixes the streams of `shuffled`, each of which shuffles a source's `encoded`."""
        self._encoded, self._shuffled, self._names = encoded, shuffled, list(encoded)
        self._packer = Packer(items, seq_len, lookahead, length_of, self._dump, self._load)
        # rows of each source in the packed sequences so far; not part of the state
        self.passed = dict.fromkeys(encoded, 0.0)

    def __iter__(self) -> "Partition":
        return self

    def __next__(self) -> list[PackUnit]:
        return units_of([self.sequence()])[0]

    def sequence(self) -> list[StreamUnit]:
        """Return the next sequence as stream units; `units_of` makes their units, faster for many sequences at once."""
        sequence, passed = next(self._packer), self.passed
        for item in sequence:
            passed[item[SOURCE]] += item[ROWS]
        return sequence

    def counts(self) -> Mapping[str, int]:
        """Return the encoders' counts after the sequences that were taken, summed over sources."""
        each = [self._counted(name) for name in self._names]
        return each[0] if len(each) == 1 else {key: sum(counts[key] for counts in each) for key in COUNTS}

    def _counted(self, name: str) -> Mapping[str, int]:
        run, n = self._shuffled[name].position
        return self._encoded[name].counts() if run is None else cast(UnitBlock, run).counted(n)

    def _dump(self, items: Sequence[StreamUnit]) -> dict[str, Any]:
        places = {
            name: encoded.dump([item for item in items if item[SOURCE] == name])
            for name, encoded in self._encoded.items()
        }
        return {"sources": [self._names.index(item[SOURCE]) for item in items], "places": places}

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
