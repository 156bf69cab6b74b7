"""The factory of the partitions of a run: sources → encode → shuffle → mix → pack, once for each partition."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Literal

from ptf.data.encode import Encode, Encoder, SetAside, TooLong
from ptf.data.encoded import Encoded
from ptf.data.mixture import Mixture, rows_of
from ptf.data.order import Ordered
from ptf.data.partition import Partition
from ptf.data.quarantine import Quarantine
from ptf.data.source_units import encoder_of, opened
from ptf.data.sources.rows import RawRow, SourceSpec, rows_once
from ptf.data.stream import Shuffle
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import Unread


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
    reorder: bool = False  # permute the events of a basket each time it is read
    share_prefixes: bool = False  # compute a prefix that several samples of a sequence share once
    quarantine: str | None = None  # directory that bad rows are written to; without it they are errors
    max_bad_rows_share: float = 0.0
    read_keys: tuple[str, ...] = ()  # keys of messages that the recipe reads
    wrap: Callable[[str, Encoder], Encoder] = lambda name, encoder: encoder  # replaces each source's encoder
    _opened: dict[str, tuple[Ordered, SourceSpec]] = field(default_factory=dict)
    _unread: dict[str, Unread] = field(default_factory=dict)
    _gives_samples: dict[str, bool] = field(default_factory=dict)  # whether any row of a source gives a sample

    def __call__(self, partition: int) -> Partition:
        """Return the partition of this number, from its beginning."""
        encoded, shuffled = {}, {}
        for name in self.sources:
            encoded[name] = each = self._encoded(name, partition)
            shuffled[name] = Shuffle(
                each, self.shuffle, f"shuffle/{self.seed}/{partition}/{name}", attrgetter("epoch"), each.dump, each.load
            )
        mixed = self.mixture.mixed(shuffled, self.shares, partition)
        return Partition(encoded, mixed, self.seq_len, self.lookahead)

    @cached_property
    def mixture(self) -> Mixture:
        """How the sources are mixed."""
        return Mixture(self.sources, self.seed, self.temperature, self.by, self.exhausted)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The share of each source."""
        return self.mixture.shares({name: self.opened(name)[0].rows for name in self.sources})

    @property
    def endless(self) -> bool:
        """Whether the data never end."""
        return self.mixture.endless

    def opened(self, name: str) -> tuple[Ordered, SourceSpec]:
        """Return a source's files with their order, and its specification with what was detected."""
        if name not in self._opened:
            reader, spec = opened(self.sources[name], self.tokenizer)
            self._opened[name] = (
                Ordered(reader, f"order/{self.seed}/{name}", self.partitions, spec.limit, self.shuffle > 0),
                spec,
            )
        return self._opened[name]

    def unread(self, name: str) -> Unread:
        """Return what nothing reads of a source, from its first rows on; later names are printed as they appear."""
        if name not in self._unread:
            unread = Unread(self.opened(name)[1], self.tokenizer, self.read_keys).read_first()
            unread.say = lambda line: print(f"source {name}: {line}", flush=True)
            self._unread[name] = unread
        return self._unread[name]

    def _encoded(self, name: str, partition: int) -> Encoded:
        """Return the encoded stream of a source in a partition."""
        file = f"{self.quarantine}/{name}-{partition:03}.jsonl"
        aside = Quarantine(file, self.max_bad_rows_share).add if self.quarantine else None
        encoder = self.wrap(name, self.encoder(name, aside, self.unread(name)))
        reorder = f"baskets/{self.seed}/{name}" if self.reorder else None
        window = self.shuffle + 2 * self.lookahead  # about how many rows are read before the first one is trained
        source = self.opened(name)[0].partition(partition, window)
        return Encoded(
            name,
            source,
            encoder,
            self.uncounted_encoder(name),
            self.partitions,
            lambda: self._has_samples(name),
            reorder,
        )

    def rows(self, name: str) -> int | None:
        """Return the rows of a source in an epoch; None where neither its files nor the config tell."""
        return rows_of(name, self.sources[name], self.opened(name)[0].rows)

    def encoder(self, name: str, aside: SetAside | None, unread: Unread | None = None) -> Encoder:
        """Return an encoder of a source's rows; a bad one is an error unless `aside` takes it."""
        spec, prefixes = self.opened(name)[1], self.share_prefixes
        return encoder_of(name, spec, self.encode, self.seq_len, self.too_long, aside, prefixes, unread)

    def uncounted_encoder(self, name: str) -> Encoder:
        """Return an encoder for rows that are counted elsewhere."""
        return self.encoder(name, (lambda bad, counts: None) if self.quarantine else None)

    def first_rows(self, name: str, most: int | None = None) -> Iterator[RawRow]:
        """Yield the first rows of a source, in the order of its files."""
        ordered = self.opened(name)[0]
        return islice(rows_once(ordered.reader, ordered.limit), most)

    def _has_samples(self, name: str) -> bool:
        """Return whether any row of a source gives a sample."""
        if name not in self._gives_samples:
            self._gives_samples[name] = any(map(self.uncounted_encoder(name), self.first_rows(name)))
        return self._gives_samples[name]
