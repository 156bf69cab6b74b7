"""The partitions of a run: sources in their order → encode → mix → pack, once for each partition.

A partition is a pure function of (config, files, partition number), so whichever process serves it, from whatever
state, yields the same sequences. Held-out data are read once, in their order (`pack_units_once`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal

from ptf.data import tokenized
from ptf.data.document import PackUnit, Place
from ptf.data.encode import COUNTS, Encode, Encoder, SetAside, TooLong
from ptf.data.encoded import Encoded
from ptf.data.kinds import with_detected_kind
from ptf.data.mixture import Mixer, Mixture, rows_of
from ptf.data.order import ORDER, Ordered, raise_if_other_order
from ptf.data.packing import Packer
from ptf.data.quarantine import Quarantine
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import Unread


class Partition(Iterator[list[PackUnit]]):
    """Stream[list[PackUnit]]: a partition's packed sequences, and what its encoders counted."""

    def __init__(self, encoded: Mapping[str, Encoded], mixer: Mixer[PackUnit], seq_len: int, lookahead: int):
        self._encoded, self._mixer, self._seq_len, self._lookahead = encoded, mixer, seq_len, lookahead
        self._packer = Packer(mixer, seq_len, lookahead)
        # rows of each source in the packed sequences so far; not part of the state
        self.passed = dict.fromkeys(encoded, 0.0)

    def __next__(self) -> list[PackUnit]:
        sequence = next(self._packer)
        for document, *_ in sequence:
            self.passed[document.place.source] += document.place.rows
        return sequence

    def counts(self) -> Mapping[str, int]:
        """Return the encoders' counts after the sequences that were taken, summed over sources."""
        each = [encoded.encoder.counts for encoded in self._encoded.values()]
        return each[0] if len(each) == 1 else {key: sum(counts[key] for counts in each) for key in COUNTS}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last sequence."""
        return {
            "order": ORDER,
            "pending": [tuple(unit[0].place) for unit in self._packer.pending.values()],
            "mixer": self._mixer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        raise_if_other_order(state)
        self._mixer.load_state_dict(state["mixer"])
        places, again = [Place(*place) for place in state["pending"]], dict[Place, PackUnit]()
        for name, encoded in self._encoded.items():
            again |= encoded.read_again(place for place in places if place.source == name)
        self._packer = Packer(self._mixer, self._seq_len, self._lookahead, pending=[again[place] for place in places])


@dataclass(frozen=True)
class Partitions:
    """Makes the partitions of a run, each by its number. Together they yield all packed sequences.

    The partitions that one process serves share the readers of the files.
    """

    sources: Mapping[str, SourceSpec]
    tokenizer: Tokenizer
    encode: Encode
    partitions: int
    seed: int
    shuffle: int
    seq_len: int
    lookahead: int
    too_long: TooLong = "error"
    temperature: float = 1.0
    by: Literal["samples", "tokens"] = "samples"
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    share_prefixes: bool = False  # compute a prefix that several samples of a sequence share once
    quarantine: str | None = None  # directory that bad rows are written to; without it they are errors
    max_bad_rows_share: float = 0.0
    read_keys: tuple[str, ...] = ()  # keys of messages that the recipe reads
    wrap: Callable[[str, Encoder], Any] = lambda name, encoder: encoder  # replaces each source's encoder
    _opened: dict[str, tuple[Ordered, SourceSpec]] = field(default_factory=dict)
    _unread: dict[str, Unread] = field(default_factory=dict)
    _gives_samples: dict[str, bool] = field(default_factory=dict)  # whether any row of a source gives a sample

    def __call__(self, partition: int) -> Partition:
        """Return the partition of this number, from its beginning."""
        encoded: dict[str, Encoded] = {}
        for name in self.sources:
            file = f"{self.quarantine}/{name}-{partition:03}.jsonl"
            aside = Quarantine(file, self.max_bad_rows_share).add if self.quarantine else None
            encoded[name] = Encoded(
                name,
                self.opened(name)[0].partition(partition),
                self.wrap(name, self.encoder(name, aside, self.unread(name))),
                partial(self.uncounted_encoder, name),
                self.partitions,
                partial(self._has_samples, name),
                f"baskets/{self.seed}/{name}",
            )
        mixer = self.mixture.mixed(encoded, self.shares, partition, rows=lambda unit: unit[0].place.rows)
        return Partition(encoded, mixer, self.seq_len, self.lookahead)

    @cached_property
    def mixture(self) -> Mixture:
        """How the sources are mixed."""
        return Mixture(self.sources, self.seed, self.temperature, self.by, self.exhausted)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The share of each source."""
        return self.mixture.shares({name: self.opened(name)[0].rows for name in self.sources})

    def opened(self, name: str) -> tuple[Ordered, SourceSpec]:
        """Return a source's files with their order, and its specification with what was detected."""
        if name not in self._opened:
            reader, spec = opened(self.sources[name], self.tokenizer)
            ordered = Ordered(reader, f"order/{self.seed}/{name}", self.partitions, self.shuffle, spec.limit)
            self._opened[name] = ordered, spec
        return self._opened[name]

    def unread(self, name: str) -> Unread:
        """Return what nothing reads of a source, from its first rows on; later names are printed as they appear."""
        if name not in self._unread:
            unread = Unread(self.opened(name)[1], self.tokenizer, self.read_keys).read_first()
            unread.say = lambda line: print(f"source {name}: {line}", flush=True)
            self._unread[name] = unread
        return self._unread[name]

    def rows(self, name: str) -> int | None:
        """Return the rows of a source in an epoch; None where neither its files nor the config tell."""
        return rows_of(name, self.sources[name], self.opened(name)[0].rows)

    def encoder(self, name: str, aside: SetAside | None, unread: Unread | None = None) -> Encoder:
        """Return an encoder of a source's rows; a bad one is an error unless `aside` takes it."""
        return Encoder(
            self.encode,
            name,
            self.opened(name)[1],
            self.seq_len,
            self.too_long,
            set_aside=aside,
            share_prefixes=self.share_prefixes,
            unread=unread,
        )

    def uncounted_encoder(self, name: str) -> Encoder:
        """Return an encoder for rows that are counted elsewhere."""
        return self.encoder(name, (lambda bad, counts: None) if self.quarantine else None)

    def first_rows(self, name: str, most: int | None = None) -> Iterator[RawRow]:
        """Yield the first rows of a source, in the order of its files."""
        ordered = self.opened(name)[0]
        return islice(rows_once(ordered.reader, ordered.limit), most)

    def _has_samples(self, name: str) -> bool:
        if name not in self._gives_samples:
            self._gives_samples[name] = any(map(self.uncounted_encoder(name), self.first_rows(name)))
        return self._gives_samples[name]


def opened(spec: SourceSpec, tokenizer: Tokenizer | None) -> tuple[Reader, SourceSpec]:
    """Return a reader of the source's rows, and the specification with what was detected."""
    if spec.kind != "tokenized":
        reader = Reader(spec.path)
        return reader, with_detected_kind(spec, reader)
    assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
    return tokenized.reader(spec.path, tokenizer, spec.verify_up_to), spec


def pack_units_once(
    sources: Mapping[str, SourceSpec],
    *,
    encode: Encode,
    seq_len: int,
    too_long: TooLong = "error",
    tokenizer: Tokenizer | None = None,
    set_aside: SetAside | None = None,
) -> Iterator[PackUnit]:
    """Yield every pack unit of every source once, in file order: held-out data.

    Tokenized sources need `tokenizer`, to check that they were written with it. A bad row is an error unless
    `set_aside` takes it.
    """
    for name, spec in sources.items():
        reader, spec = opened(spec, tokenizer)
        encoder = Encoder(encode, name, spec, seq_len, too_long, set_aside=set_aside)
        for row in rows_once(reader, spec.limit):
            yield from encoder(row)
