"""The data of a run put together: sources → encode → shuffle → mix → pack, once for each lane; a single pass for validation; prompts.

The one idea: a lane is a pure function of (config, lane number), so whoever serves it, from whatever state, yields the same rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ptf.data import tokenized
from ptf.data.encode import COUNTS, Encode, Encoder, TooLong, encode_prompt
from ptf.data.mixer import Mixer
from ptf.data.packing import Packer
from ptf.data.sample import Atom, dump_atoms, load_atoms
from ptf.data.sources import Row, Source, rows_once
from ptf.data.stream import Later, Map, Shuffle, Stream, settle
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    path: str
    weight: float = 1.0
    kind: Literal["chat", "prompt", "tokenized"] = "chat"


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


def lane_stream(
    lane: int, *, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, encode: Encode, lanes: int, seed: int, shuffle: int,
    seq_len: int, lookahead: int, too_long: TooLong = "error",
) -> Lane:  # fmt: skip
    """Everything that lane `lane` of `lanes` will ever train on, as packed rows."""
    encoded, shuffled = [], {}
    for name, spec in sources.items():
        if spec.kind == "tokenized":
            source, to_atoms = tokenized.source(spec.path, tokenizer.fingerprint(), lane, lanes), tokenized.decode
        else:
            source, to_atoms = Source(spec.path, lane, lanes), encode
        encoded.append(Encoded(source, Encoder(to_atoms, name, seq_len, too_long)))
        shuffled[name] = Shuffle(encoded[-1], shuffle, f"shuffle/{seed}/{lane}/{name}", encoded[-1].epoch, dump_atoms, load_atoms)
    return Lane(encoded, Mixer(shuffled, {name: spec.weight for name, spec in sources.items()}), seq_len, lookahead)


def atoms_once(
    sources: Mapping[str, SourceSpec], *, encode: Encode, seq_len: int, too_long: TooLong = "error", tokenizer: Tokenizer | None = None
) -> Iterator[Atom]:
    """Every atom of every source once, in file order: held-out data. Tokenized sources need `tokenizer`, to check that they were written with it."""
    for name, spec in sources.items():
        if spec.kind == "tokenized":
            assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
            places, to_atoms = tokenized.places(spec.path, tokenizer.fingerprint()), tokenized.decode
        else:
            places, to_atoms = rows_once(spec.path), encode
        encoder = Encoder(to_atoms, name, seq_len, too_long)
        for place in places:
            yield from encoder(place)


def prompts_once(path: str, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Every prompt of a source once, in file order; its place is its index."""
    for index, (row, where) in enumerate(rows_once(path)):
        yield _prompt(row, where, name, tokenizer, index)


def _prompt(row: Row, where: str, name: str, tokenizer: Tokenizer, index: int) -> Prompt:
    try:
        return encode_prompt(row, tokenizer, name, index)
    except UserError as e:
        raise UserError(f"{where} (source {name}): {e}") from None


class Prompts:
    """Stream[Prompt]: endless, shuffled, mixed by weight. Rows wait in the shuffle window as JSON text, so that a resumed run sees equal ones."""

    def __init__(self, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, seed: int, shuffle: int):
        self._tokenizer, self._index = tokenizer, 0
        self._mixer = Mixer({name: self._source(name, spec.path, seed, shuffle) for name, spec in sources.items()}, {n: s.weight for n, s in sources.items()})

    @staticmethod
    def _source(name: str, path: str, seed: int, shuffle: int) -> Stream[str]:
        source = Source(path)
        texts = Map(source, lambda place: json.dumps([*place, name], default=str))
        return Shuffle(texts, shuffle, f"prompts/{seed}/{name}", lambda: source.epoch, list, list)

    def __next__(self) -> Prompt:
        row, where, name = json.loads(next(self._mixer))
        self._index += 1
        return _prompt(row, where, name, self._tokenizer, self._index - 1)

    def state_dict(self) -> dict[str, Any]:
        return settle({"index": self._index, "mixer": self._mixer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])


def prompts_stream(sources: Mapping[str, SourceSpec], *, tokenizer: Tokenizer, seed: int, shuffle: int) -> Prompts:
    """What an online recipe draws its prompts from."""
    return Prompts(sources, tokenizer, seed, shuffle)
