"""The prompts of online recipes: one pass over a source, and an endless stream, shuffled and mixed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptf.data.encode import encode_prompt
from ptf.data.kinds import shaped
from ptf.data.mixture import Mixture
from ptf.data.order import ORDER, Ordered, raise_if_other_order
from ptf.data.quarantine import FAULTS, reason_of
from ptf.data.sources.blocks import Row
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


def prompts_once(spec: SourceSpec, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield every prompt of a source once, in file order; its position is its index."""
    for index, row in enumerate(rows_once(Reader(spec.path), spec.limit)):
        yield _prompt(row, spec, name, tokenizer, index)


def _prompt(row: RawRow, spec: SourceSpec, source: str, tokenizer: Tokenizer, index: int) -> Prompt:
    """Encode a row as a prompt; raise UserError with its place for a bad row."""
    values: Row = {}
    try:
        values = shaped(row.read(), spec.columns, "prompt", row.rows.columnar)
        return replace(encode_prompt(values, tokenizer, source, index), where=row.where)
    except FAULTS as e:
        raise UserError(f"{row.where} (source {source}): {reason_of(e, values)}") from (
            None if isinstance(e, UserError) else e
        )


class Prompts:
    """Stream[Prompt]: endless, shuffled and mixed prompts.

    Without weights, every row of every source comes once before any comes again.
    """

    def __init__(
        self, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0
    ):
        self._tokenizer, self._index = tokenizer, 0
        self.orders = {
            name: Ordered(Reader(spec.path), f"prompts/{seed}/{name}", 1, shuffle, spec.limit)
            for name, spec in sources.items()
        }
        streams = {name: ordered.partition(0) for name, ordered in self.orders.items()}
        self.mixture = Mixture(sources, seed, temperature)
        self.shares = self.mixture.shares(self.rows)
        self._mixer = self.mixture.mixed(streams, self.shares, 0, rows=lambda row: 1.0)

    @property
    def rows(self) -> dict[str, int | None]:
        """Rows of each source; None where the number is not known."""
        return {name: ordered.rows for name, ordered in self.orders.items()}

    def __next__(self) -> Prompt:
        row, name = next(self._mixer), self._mixer.last
        self._index += 1
        return _prompt(row, self.mixture.sources[name], name, self._tokenizer, self._index - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last prompt."""
        return {
            "order": ORDER,
            "index": self._index,
            "tokenizer": self._tokenizer.identity,
            "mixer": self._mixer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        raise_if_other_order(state)
        self._tokenizer.raise_if_different(state["tokenizer"], "the checkpoint")
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])
