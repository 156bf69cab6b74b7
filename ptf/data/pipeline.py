"""The data of a run put together: sources → encode → shuffle → mix → pack, once for each lane; a single pass for validation; prompts.

The one idea: a lane is a pure function of (config, lane number), so whoever serves it, from whatever state, yields the same rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ptf.data import tokenized
from ptf.data.baskets import Reordered
from ptf.data.blocks import Reader, plain_row
from ptf.data.encode import COUNTS, Encode, Encoder, SetAside, TooLong, encode_prompt, found_out, shaped
from ptf.data.mixer import Mixer
from ptf.data.packing import Packer
from ptf.data.quarantine import Quarantine
from ptf.data.sample import Atom, dump_atoms, length, load_atoms
from ptf.data.sources import Place, Source, SourceSpec, rows_once
from ptf.data.stream import Later, Map, Shuffle, Stream, settle
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


class Encoded:
    """Stream[Atom]: the atoms of a lane's rows, one after the other."""

    def __init__(self, source: Source, encoder: Encoder):
        self._source, self._encoder = source, encoder
        self._pending: list[Atom] = []

    def __next__(self) -> Atom:
        empty = 0
        while not self._pending:
            self._pending = self._encoder(next(self._source))[::-1]
            empty += 1
            if self._source.rows is not None and empty > self._source.rows:
                raise UserError(f"no row of {self._source.path} left a sample to train on: {self._encoder.counts}")
        return self._pending.pop()

    def epoch(self) -> int:
        return self._source.epoch

    def counts(self) -> Mapping[str, int]:
        return self._encoder.counts

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "counts": dict(self._encoder.counts), "pending": Later(tuple(self._pending), dump_atoms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._encoder.counts = {key: int(state["counts"][key]) for key in COUNTS}
        self._pending = load_atoms(state["pending"])


class Lane(Packer):
    """Stream[list[Atom]]: a lane's packed rows, and what its encoders counted."""

    def __init__(self, encoded: Sequence[Encoded], atoms: Stream[Atom], seq_len: int, lookahead: int):
        super().__init__(atoms, seq_len, lookahead)
        self._encoded = encoded

    def counts(self) -> Mapping[str, int]:
        return {key: sum(e.counts()[key] for e in self._encoded) for key in COUNTS}


@dataclass(frozen=True)
class Lanes:
    """Lane number → everything that lane will ever train on, as packed rows. The lanes that one process serves read its files together."""

    sources: Mapping[str, SourceSpec]
    tokenizer: Tokenizer
    encode: Encode
    lanes: int
    seed: int
    shuffle: int
    seq_len: int
    lookahead: int
    too_long: TooLong = "error"
    temperature: float = 1.0
    by: Literal["samples", "tokens"] = "samples"
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    reorder: bool = False  # the events of a basket, each time it is read
    quarantine: str | None = None  # directory of the bad rows; without it they are errors
    max_bad: float = 0.0
    _readers: dict[str, tuple[Reader, SourceSpec]] = field(default_factory=dict)

    def __call__(self, lane: int) -> Lane:
        encoded, shuffled = [], {}
        for name, spec in self.sources.items():
            if name not in self._readers:
                self._readers[name] = opened(spec, self.tokenizer)
            reader, spec = self._readers[name]
            source = Source(reader, lane, self.lanes, spec.limit)
            aside = Quarantine(f"{self.quarantine}/{name}-{lane:03}.jsonl", self.max_bad).add if self.quarantine else None
            encoded.append(Encoded(source, encoder_of(name, spec, self.encode, self.seq_len, self.too_long, aside)))
            key = f"shuffle/{self.seed}/{lane}/{name}"
            shuffled[name] = Shuffle(encoded[-1], self.shuffle, key, encoded[-1].epoch, dump_atoms, load_atoms)
        size = length if self.by == "tokens" else None
        weights = {name: spec.weight for name, spec in self.sources.items()}
        epochs = {name: spec.epochs for name, spec in self.sources.items()}
        mixed = Mixer(shuffled, weights, temperature=self.temperature, size=size, exhausted=self.exhausted, epochs=epochs)
        atoms = Reordered(mixed, f"baskets/{self.seed}/{lane}") if self.reorder else mixed
        return Lane(encoded, atoms, self.seq_len, self.lookahead)

    @property
    def cheap(self) -> bool:
        return all(spec.kind == "tokenized" for spec in self.sources.values())

    @property
    def endless(self) -> bool:
        ending = [spec.epochs is not None for spec in self.sources.values()]
        return not (any(ending) if self.exhausted == "stop" else all(ending))


def opened(spec: SourceSpec, tokenizer: Tokenizer | None) -> tuple[Reader, SourceSpec]:
    """Its rows, and what they are."""
    if spec.kind != "tokenized":
        reader = Reader(spec.path, plain_row)
        return reader, found_out(spec, reader)
    assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
    return tokenized.reader(spec.path, tokenizer, spec.verify_up_to), spec


def encoder_of(name: str, spec: SourceSpec, encode: Encode, seq_len: int, too_long: TooLong, set_aside: SetAside | None = None) -> Encoder:
    """What makes atoms of a source's rows."""
    if spec.kind == "tokenized":
        return Encoder(tokenized.decode, name, seq_len, too_long)
    return Encoder(encode, name, seq_len, too_long, columns=spec.columns, kind=spec.kind, set_aside=set_aside)


def atoms_once(
    sources: Mapping[str, SourceSpec], *, encode: Encode, seq_len: int, too_long: TooLong = "error", tokenizer: Tokenizer | None = None
) -> Iterator[Atom]:
    """Every atom of every source once, in file order: held-out data. Tokenized sources need `tokenizer`, to check that they were written with it."""
    for name, spec in sources.items():
        reader, spec = opened(spec, tokenizer)
        encoder = encoder_of(name, spec, encode, seq_len, too_long)
        for place in rows_once(reader, spec.limit):
            yield from encoder(place)


def prompts_once(spec: SourceSpec, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Every prompt of a source once, in file order; its place is its index."""
    for index, place in enumerate(rows_once(Reader(spec.path), spec.limit)):
        yield _prompt(place, name, spec, tokenizer, index)


def _prompt(place: Place, name: str, spec: SourceSpec, tokenizer: Tokenizer, index: int) -> Prompt:
    try:
        return encode_prompt(shaped(place.read(), spec.columns), tokenizer, name, index)
    except UserError as e:
        raise UserError(f"{place.where} (source {name}): {e}") from None


class Prompts:
    """Stream[Prompt]: endless, shuffled, mixed by weight. Rows wait in the shuffle window as JSON text, so that a resumed run sees equal ones."""

    def __init__(self, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0):
        self._tokenizer, self._sources, self._index = tokenizer, sources, 0
        streams = {name: self._source(name, spec, seed, shuffle) for name, spec in sources.items()}
        self._mixer = Mixer(streams, {n: s.weight for n, s in sources.items()}, temperature=temperature)

    @staticmethod
    def _source(name: str, spec: SourceSpec, seed: int, shuffle: int) -> Shuffle[str]:
        source = Source(Reader(spec.path), limit=spec.limit)
        return Shuffle(Map(source, partial(_text, name)), shuffle, f"prompts/{seed}/{name}", lambda: source.epoch, list, list)

    def __next__(self) -> Prompt:
        row, where, name = json.loads(next(self._mixer))
        self._index += 1
        return _prompt(Place(lambda: row, where), name, self._sources[name], self._tokenizer, self._index - 1)

    def state_dict(self) -> dict[str, Any]:
        return settle({"index": self._index, "tokenizer": self._tokenizer.identity, "mixer": self._mixer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokenizer.refuse_other(state["tokenizer"], "the checkpoint")
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])


def _text(name: str, place: Place) -> str:
    try:
        return json.dumps([place.read(), place.where, name], default=str)
    except UserError as e:
        raise UserError(f"{place.where} (source {name}): {e}") from None


def prompts_stream(sources: Mapping[str, SourceSpec], *, tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0) -> Prompts:
    """What an online recipe draws its prompts from."""
    return Prompts(sources, tokenizer, seed, shuffle, temperature)
