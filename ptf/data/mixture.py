"""The mixture of the sources: the share of each, and what happens when a source has completed its epochs.

The mixture is not random. The next sample is taken from the stream that is furthest below its share. At any time each
stream has contributed its share to within one sample, and the counts are the mixture's whole state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ptf.data.document import length
from ptf.data.sources.rows import SourceSpec
from ptf.data.stream import Passes, randint
from ptf.errors import UserError

T = TypeVar("T")


class Mixer(Iterator[T], Generic[T]):
    """Stream[T]: a mixture of streams by shares, which are counted in samples or, with `size`, in units of `size`.

    `exhausted` is what happens when a stream has yielded its `epochs`: `drop` continues with the other streams, in
    proportion to their shares, until all have yielded theirs; `repeat` continues with all streams until then; `stop`
    ends the mixture. A stream that has no more items is not used further.
    """

    def __init__(
        self,
        streams: Mapping[str, Passes[T]],
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
        self.last = ""
        """The stream that the last item is of."""

    def __next__(self) -> T:
        left = self._left()
        if not left:
            raise StopIteration
        name = left[0]
        if len(left) > 1:
            shares, n = sum(self._shares[name] for name in left), sum(self.taken[name] for name in left) + 1
            # of equals, the first stream in the config is chosen
            name = max(left, key=lambda name: self._shares[name] / shares * n + self._deficits[name] - self.taken[name])
        item = next(self._streams[name])
        self.last = name
        self.taken[name] += 1 if self._size is None else self._size(item)
        return item

    def _left(self) -> list[str]:
        """Return the streams to take items from; an empty list if the mixture has ended."""
        for name, stream in self._streams.items():
            passes, epochs = stream.passes(), self._epochs.get(name)
            if passes is None:
                self._empty.add(name)
            if passes is None or (epochs is not None and passes >= epochs):
                self._ended.add(name)
        left = [name for name in self._streams if name not in self._ended]
        if not left or (self._exhausted == "stop" and self._ended - self._empty):
            return []
        return [name for name in self._streams if name not in self._empty] if self._exhausted == "repeat" else left

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item."""
        return {
            "taken": dict(self.taken),
            "ended": sorted(self._ended),
            "empty": sorted(self._empty),
            "streams": {name: stream.state_dict() for name, stream in self._streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.taken = {name: float(state["taken"][name]) for name in self._streams}
        self._ended, self._empty = set(state["ended"]), set(state["empty"])
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])


@dataclass(frozen=True)
class Mixture:
    """How several sources make one stream."""

    sources: Mapping[str, SourceSpec]
    seed: int
    temperature: float = 1.0
    by: Literal["samples", "tokens"] = "samples"
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"

    @property
    def weighted(self) -> bool:
        """Whether the sources have shares by their sampling weights.

        Otherwise every row is read once per epoch, and a source ends when it has completed its epochs.
        """
        return any(spec.sampling_weight is not None for spec in self.sources.values())

    @property
    def ends(self) -> Literal["repeat", "drop", "stop"]:
        """What happens when a source has completed its epochs."""
        return self.exhausted if self.weighted else "drop"

    @property
    def endless(self) -> bool:
        """Whether the mixture never ends."""
        ending = [spec.epochs is not None for spec in self.sources.values()]
        return not (any(ending) if self.ends == "stop" else all(ending))

    def shares(self, rows: Mapping[str, int | None]) -> dict[str, float]:
        """Return the share of each source; `rows` are the numbers of rows that the files tell (None: unknown).

        Raise UserError if a number of rows is needed and not known.
        """
        known = {name: rows_of(name, spec, rows[name]) for name, spec in self.sources.items()}
        if len(known) == 1:
            return dict.fromkeys(known, 1.0)
        shares = {name: spec.sampling_weight or 1.0 for name, spec in self.sources.items()} if self.weighted else known
        for name, share in shares.items():
            if share is None:
                raise UserError(
                    f"the files of data.sources.{name} do not tell how many rows they have, "
                    "and without sampling weights, sources are mixed by their rows: "
                    "give it `row_count` (roughly), or give the sources a `sampling_weight`"
                )
        return {name: float(share or 0) ** (1 / self.temperature) for name, share in shares.items()}

    def mixed(
        self,
        streams: Mapping[str, Passes[Any]],
        shares: Mapping[str, float],
        partition: int,
        rows: Callable[[Any], float],
    ) -> Mixer[Any]:
        """Return the mixture of the streams that a partition reads.

        `rows` returns the rows of its source that an item stands for. Where shares are of tokens, items are pack units.
        """
        size = length if self.by == "tokens" else None
        epochs = {name: spec.epochs for name, spec in self.sources.items()}
        deficits = {name: randint(f"mix/{self.seed}/{partition}/{name}", 0, 1 << 20) / (1 << 20) for name in streams}
        return Mixer(
            streams,
            shares,
            size=size if self.weighted else rows,
            exhausted=self.ends,
            epochs=epochs,
            initial_deficits=deficits,
        )


def rows_of(name: str, spec: SourceSpec, found: int | None) -> int | None:
    """Return the number of rows of a source in an epoch: the number `found` in its files or, if the files do not tell
    it, `row_count` of the config; at most `limit`.

    Raise UserError if the files and the config give different numbers.
    """
    if found is not None and spec.rows is not None and found != min(spec.rows, spec.limit or spec.rows):
        limited = "" if spec.limit is None else f" within limit ({spec.limit})"
        raise UserError(
            f"data.sources.{name}.row_count is {spec.rows}, but its files contain {found} rows{limited}; "
            "remove `row_count`: ptf counts these files itself"
        )
    rows = spec.rows if found is None else found
    return rows if rows is None or spec.limit is None else min(rows, spec.limit)
