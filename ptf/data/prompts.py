"""The prompts of online recipes: one pass over a source, and an endless stream, shuffled and mixed."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ptf.data.encode import encode_prompt
from ptf.data.kinds import shaped
from ptf.data.mixture import Mixture
from ptf.data.order import ORDER, Ordered, PartitionSource, raise_if_other_order
from ptf.data.quarantine import FAULTS, reason_of
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, SourceSpec, rows_once
from ptf.data.stream import Shuffle, settle
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


def prompts_once(spec: SourceSpec, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield every prompt of a source once, in file order; its position is its index."""
    for index, place in enumerate(rows_once(Reader(spec.path), spec.limit)):
        yield _prompt(_text(place, spec, name), tokenizer, index)


class _PromptRow(NamedTuple):
    """A row that will become a prompt, under ptf's names and as JSON text, which takes less memory than objects."""

    text: str
    where: str
    source: str
    place: tuple[int, int, int, int]  # epoch, file, block, row
    epoch: int


def _text(row: RawRow, spec: SourceSpec, source: str) -> _PromptRow:
    """Return a row as text; raise UserError with its place for a bad row."""
    place = row.epoch, row.file, row.number, row.row
    try:
        values = shaped(row.read(), spec.columns, "prompt", row.block.columnar)
        return _PromptRow(json.dumps(values), row.where, source, place, row.epoch)
    except FAULTS as e:
        raise UserError(f"{row.where} (source {source}): {reason_of(e, {})}") from (
            None if isinstance(e, UserError) else e
        )


def _prompt(row: _PromptRow, tokenizer: Tokenizer, index: int) -> Prompt:
    """Encode a row as a prompt; raise UserError with its place for a bad row."""
    values = json.loads(row.text)
    try:
        return replace(encode_prompt(values, tokenizer, row.source, index), where=row.where)
    except FAULTS as e:
        raise UserError(f"{row.where} (source {row.source}): {reason_of(e, values)}") from (
            None if isinstance(e, UserError) else e
        )


class _PromptRows:
    """Stream[_PromptRow]: the rows of a source as text."""

    def __init__(self, name: str, source: PartitionSource, spec: SourceSpec):
        self._name, self._source, self._spec = name, source, spec

    def __next__(self) -> _PromptRow:
        return _text(next(self._source), self._spec, self._name)

    def dump(self, rows: Sequence[_PromptRow]) -> np.ndarray:
        """Return the places and checksums of rows, [rows, 5] int32."""
        return np.array([(*row.place, zlib.crc32(row.text.encode()) - (1 << 31)) for row in rows], np.int32).reshape(
            -1, 5
        )

    def load(self, places: np.ndarray) -> list[_PromptRow]:
        """Read the rows of places again; raise UserError where another row is found."""
        by_place: dict[tuple[int, ...], _PromptRow] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, checksum = key
            by_place[key] = text = _text(self._source.at(file, number, row, epoch), self._spec, self._name)
            if zlib.crc32(text.text.encode()) - (1 << 31) != checksum:
                raise UserError(
                    f"{text.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
        return [by_place[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item; `settle` finishes it."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._source.load_state_dict(state)


class Prompts:
    """Stream[Prompt]: endless, shuffled and mixed prompts.

    Without weights, every row of every source comes once before any comes again.
    """

    def __init__(
        self, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0
    ):
        self._tokenizer, self._index = tokenizer, 0
        self.orders = {
            name: Ordered(Reader(spec.path), f"prompts/{seed}/{name}", 1, spec.limit, shuffle > 0)
            for name, spec in sources.items()
        }
        streams: dict[str, Shuffle[Any]] = {}
        for name, ordered in self.orders.items():
            texts = _PromptRows(name, ordered.partition(0, shuffle), sources[name])
            streams[name] = Shuffle(
                texts, shuffle, f"prompts/{seed}/{name}", attrgetter("epoch"), texts.dump, texts.load
            )
        self.mixture = Mixture(sources, seed, temperature)
        self.shares = self.mixture.shares(self.rows)
        self._mixer = self.mixture.mixed(streams, self.shares, 0, rows=lambda row: 1.0)

    @property
    def rows(self) -> dict[str, int | None]:
        """Rows of each source; None where the number is not known."""
        return {name: ordered.rows for name, ordered in self.orders.items()}

    def __next__(self) -> Prompt:
        row = next(self._mixer)
        self._index += 1
        return _prompt(row, self._tokenizer, self._index - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last prompt, written out."""
        return settle(
            {
                "order": ORDER,
                "index": self._index,
                "tokenizer": self._tokenizer.identity,
                "mixer": self._mixer.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        raise_if_other_order(state)
        self._tokenizer.raise_if_different(state["tokenizer"], "the checkpoint")
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])
