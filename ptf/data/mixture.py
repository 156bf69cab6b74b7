"""The mixture of the sources: the share of each, and what happens when a source has completed its epochs."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ptf.data.mixer import Mixer
from ptf.data.sources.rows import SourceSpec
from ptf.data.stream import Shuffle, randint
from ptf.errors import UserError


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

    def mixed(self, streams: Mapping[str, Shuffle[Any]], shares: Mapping[str, float], partition: int) -> Mixer[Any]:
        """Return the mixture of the streams that a partition reads.

        Their items have `rows`, the rows of the source that they stand for, and `length` where shares are of tokens.
        """
        size = attrgetter("length") if self.by == "tokens" else None
        epochs = {name: spec.epochs for name, spec in self.sources.items()}
        deficits = {name: randint(f"mix/{self.seed}/{partition}/{name}", 0, 1 << 20) / (1 << 20) for name in streams}
        return Mixer(
            streams,
            shares,
            size=size if self.weighted else attrgetter("rows"),
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
