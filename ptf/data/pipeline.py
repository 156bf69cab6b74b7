"""The data of a run put together: sources → encode → shuffle → mix → pack, once for each lane; a single pass for
validation; prompts.

A lane is a pure function of (config, files, lane number), so whichever process serves it, from whatever
state, yields the same rows. What waits in a lane's windows is identified by the place that it was read from: a state
holds places, and the process that continues from it reads them again.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ptf.data import tokenized
from ptf.data.baskets import reorder_baskets
from ptf.data.encode import COUNTS, Encode, Encoder, SetAside, TooLong, encode_prompt
from ptf.data.items import (
    ROWS,
    SOURCE,
    Item,
    after_empty_rows,
    atoms_of,
    epoch_of,
    items_of,
    length_of,
    place_of,
    rows_in,
    stored_items,
)
from ptf.data.kinds import shaped, with_detected_kind
from ptf.data.mixer import Mixer
from ptf.data.order import ORDER, LaneSource, Ordered, Ranges, Run
from ptf.data.packing import Packer
from ptf.data.quarantine import FAULTS, Quarantine, reason_of
from ptf.data.sample import PackUnit
from ptf.data.sources.blocks import Location, Reader, Row
from ptf.data.sources.rows import Place, SourceSpec, rows_once
from ptf.data.stream import Deferred, Shuffle, Stream, randint, settle
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


@dataclass(frozen=True, eq=False, slots=True)
class ItemRun:
    """Consecutive items of one epoch in a lane of tokenized rows, and the state of `Encoded` behind any of them."""

    items: list[Item]
    epoch: int
    rows: Run
    ends: list[int] | None  # for each item, how many of the rows are read when it is taken; None: one a row
    counts: np.ndarray  # [rows + 1, len(COUNTS)] int64: the encoder's counts behind so many rows
    before: dict[str, Any]  # the state before the first item, without `source` and `counts`

    def state(self, n: int) -> dict[str, Any]:
        """Return the state behind the first n items."""
        rows = self._read(n)
        pending = (
            ()
            if self.ends is None
            else tuple(self.items[k] for k in range(len(self.items) - 1, n - 1, -1) if self.ends[k] == rows)
        )
        taken = {"without": 0, "found": self.epoch} if n else {}
        return (
            self.before
            | {"source": self.rows.state(rows), "counts": self.counted(n), "pending": Deferred(pending, dump)}
            | taken
        )

    def counted(self, n: int) -> dict[str, int]:
        """Return the encoder's counts behind the first n items."""
        return dict(zip(COUNTS, self.counts[self._read(n)].tolist(), strict=True))

    def _read(self, n: int) -> int:
        """Return how many rows are read to take the first n items."""
        return n if self.ends is None or not n else self.ends[n - 1]


def dump(items: Sequence[Item]) -> np.ndarray:
    """Return the places and checksums of items, [items, 7] int32."""
    return np.array([place_of(item) for item in items], np.int32).reshape(-1, 7)


class Encoded:
    """Stream[Item]: the samples of a lane's rows, one after the other.

    It ends if no row of the lane will ever give a sample, although rows of other lanes do.
    """

    def __init__(
        self,
        name: str,
        source: LaneSource,
        encoder: Encoder,
        reread_encoder: Encoder,
        patience: int,
        any_sample: Callable[[], bool],
        reorder: str | None,
    ):
        """Make the stream.

        `reread_encoder` encodes rows that were encoded before. After `patience` epochs without a sample, `any_sample`
        is called to find whether any row of the source gives one. `reorder` names the randomness by which baskets are
        reordered.
        """
        self._name, self._source = name, source
        self._encoder, self._reread_encoder = encoder, reread_encoder
        self._patience, self._any_sample, self._reorder = patience, any_sample, reorder
        self._pending: list[Item] = []  # items of the last row, the next one last
        self._empty_rows = 0  # rows without a sample since the last row with one
        self._last_epoch = 0  # the epoch of the last row with a sample
        self._ended = False

    def __next__(self) -> Item:
        while not self._pending:
            if self._ended:
                raise StopIteration
            row = next(self._source)
            if self._empty_rows and row.epoch - self._last_epoch > self._patience:
                if not self._any_sample():
                    raise UserError(f"no row of {self._source.path} left a sample to train on: {self._encoder.counts}")
                self._ended = True
            self._pending = self._items(row, self._encoder(row), self._empty_rows)[::-1]
            self._empty_rows = 0 if self._pending else self._empty_rows + 1
            if self._pending:
                self._last_epoch = row.epoch
        return self._pending.pop()

    def _items(self, row: Place, atoms: Sequence[PackUnit], empty_rows: int) -> list[Item]:
        """Return the items of one row."""
        if self._reorder is not None:
            atoms = [
                reorder_baskets(atom, f"{self._reorder}/{(row.epoch, row.file, row.number, row.row, i)}")
                for i, atom in enumerate(atoms)
            ]
        return items_of(atoms, self._name, row.epoch, (row.file, row.number), row.row, empty_rows)

    def run(self, most: int) -> ItemRun | None:
        """Return the items of the next rows, at most `most` rows, without the cost of each row by itself.

        Return None where `__next__` must be used.
        """
        encoder = self._encoder
        if (
            self._empty_rows
            or self._pending
            or self._ended
            or self._reorder
            or not isinstance(encoder, tokenized.Decoder)
            or not isinstance(self._source, Ranges)
        ):
            return None
        rows = self._source.run(most, encoder.fits)
        if rows is None:
            return None
        before = {"without": self._empty_rows, "found": self._last_epoch, "ended": False}
        items_of_heads, recorded = [], []
        ends: list[int] | None = None
        for head, n in zip(rows.heads, rows.counts(len(rows.order)), strict=True):
            block, first, at = head[3], head[1], (head[5], head[6])
            recorded.append(block.told[first : first + n])
            if block.simple(first, first + n):
                items_of_heads.append(iter(stored_items(block, first, first + n, self._name, rows.epoch, at)))
            else:
                ends = []
                items_of_heads.append(
                    iter([items_of(block.atoms(i), self._name, rows.epoch, at, i, 0) for i in range(first, first + n)])
                )
        items: list[Any] = list(map(next, map(items_of_heads.__getitem__, rows.order.tolist())))
        counts = encoder.counted(np.concatenate(recorded)[_row_order(rows.order)])
        if ends is not None:
            items, ends = self._flat(items)
        if items:
            self._last_epoch = rows.epoch
        encoder.counts = dict(zip(COUNTS, counts[-1].tolist(), strict=True))
        return ItemRun(items, rows.epoch, rows, ends, counts, before)

    def _flat(self, rows: Sequence[Any]) -> tuple[list[Item], list[int]]:
        """Return the items of rows, each of which is an item or a list of them, and the number of rows read with
        each."""
        items: list[Item] = []
        ends: list[int] = []
        for i, row in enumerate(rows):
            if isinstance(row, tuple):
                row = [row]
            if not row:
                self._empty_rows += 1
                continue
            if self._empty_rows:
                row = [after_empty_rows(row[0], self._empty_rows), *row[1:]]
                self._empty_rows = 0
            items += row
            ends += [i + 1] * len(row)
        return items, ends

    def counts(self) -> Mapping[str, int]:
        """Return the encoder's counts."""
        return self._encoder.counts

    def dump(self, items: Sequence[Item]) -> np.ndarray:
        """Return the places and checksums of items."""
        return dump(items)

    def load(self, places: np.ndarray) -> list[Item]:
        """Read the samples of places again, every row once.

        Raise UserError where another sample is found.
        """
        by_place: dict[tuple[int, ...], Item] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, i, empty_rows, _ = key
            at = self._source.at(file, number, row, epoch)
            items = self._items(at, self._reread_encoder(at), empty_rows)
            if i >= len(items) or place_of(items[i]) != key:
                raise UserError(
                    f"{at.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
            by_place[key] = items[i]
        return [by_place[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last item; `settle` finishes it."""
        return {
            "source": self._source.state_dict(),
            "counts": dict(self._encoder.counts),
            "pending": Deferred(tuple(self._pending), self.dump),
            "without": self._empty_rows,
            "found": self._last_epoch,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._source.load_state_dict(state["source"])
        # an earlier version counted fewer things
        self._encoder.counts = {key: int(state["counts"].get(key, 0)) for key in COUNTS}
        self._empty_rows, self._last_epoch, self._ended = (
            int(state["without"]),
            int(state["found"]),
            bool(state["ended"]),
        )
        self._pending = self.load(state["pending"])


def _row_order(order: np.ndarray) -> np.ndarray:
    """Return where each row that is read lies among the heads' rows, which are listed head by head.

    The result is [rows] int64.
    """
    at = np.empty(len(order), np.int64)
    at[np.argsort(order, kind="stable")] = np.arange(len(order))
    return at


class Lane:
    """Stream[list[PackUnit]]: a lane's packed rows, and what its encoders counted."""

    def __init__(
        self,
        encoded: Mapping[str, Encoded],
        shuffled: Mapping[str, Shuffle[Item]],
        items: Stream[Item],
        seq_len: int,
        lookahead: int,
    ):
        """Make the lane: `items` mixes the streams of `shuffled`, each of which shuffles a source's `encoded`."""
        self._encoded, self._shuffled, self._names = encoded, shuffled, list(encoded)
        self._packer = Packer(items, seq_len, lookahead, length_of, self._dump, self._load)
        self.passed = dict.fromkeys(
            encoded, 0.0
        )  # rows of each source in the packed rows so far; not part of the state

    def __iter__(self) -> "Lane":
        return self

    def __next__(self) -> list[PackUnit]:
        return atoms_of([self.row()])[0]

    def row(self) -> list[Item]:
        """Return the next row as items, from which `atoms_of` makes units, faster for many rows at once."""
        row, passed = next(self._packer), self.passed
        for item in row:
            passed[item[SOURCE]] += item[ROWS]
        return row

    def counts(self) -> Mapping[str, int]:
        """Return the encoders' counts behind the rows that were taken, summed over sources."""
        each = [self._counted(name) for name in self._names]
        return each[0] if len(each) == 1 else {key: sum(counts[key] for counts in each) for key in COUNTS}

    def _counted(self, name: str) -> Mapping[str, int]:
        run, n = self._shuffled[name].position
        return self._encoded[name].counts() if run is None else cast(ItemRun, run).counted(n)

    def _dump(self, items: Sequence[Item]) -> dict[str, Any]:
        places = {
            name: encoded.dump([item for item in items if item[SOURCE] == name])
            for name, encoded in self._encoded.items()
        }
        return {"sources": [self._names.index(item[SOURCE]) for item in items], "places": places}

    def _load(self, state: Mapping[str, Any]) -> list[Item]:
        items = {name: iter(encoded.load(state["places"][name])) for name, encoded in self._encoded.items()}
        return [next(items[self._names[i]]) for i in state["sources"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last item; `settle` finishes it."""
        return {"order": ORDER, **self._packer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        refuse_other_order(state)
        self._packer.load_state_dict(state)


def refuse_other_order(state: Mapping[str, Any]) -> None:
    """Raise UserError if the state of a lane or of prompts is of a version that reads rows in another order."""
    if state.get("order") != ORDER:
        raise UserError(
            "the checkpoint is of a version of ptf that read the data in another order: "
            "continue it with that version, or start a new run"
        )


@dataclass(frozen=True)
class Mixture:
    """How several sources make one stream."""

    sources: Mapping[str, SourceSpec]
    seed: int
    temperature: float = 1.0
    by: Literal["samples", "tokens"] = "samples"
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    stands_for: Callable[[Any], float] = rows_in  # how many rows of the source an item stands for

    @property
    def weighted(self) -> bool:
        """Whether the sources have shares by their weights.

        Otherwise every row comes once an epoch, and a source ends when it has had its epochs.
        """
        return any(spec.weight is not None for spec in self.sources.values())

    @property
    def ends(self) -> Literal["repeat", "drop", "stop"]:
        """What happens when a source has had its epochs."""
        return self.exhausted if self.weighted else "drop"

    @property
    def endless(self) -> bool:
        """Whether the mixture never ends."""
        ending = [spec.epochs is not None for spec in self.sources.values()]
        return not (any(ending) if self.ends == "stop" else all(ending))

    def shares(self, rows: Mapping[str, int | None]) -> dict[str, float]:
        """Return the share of each source; `rows` are the numbers of rows that the files know.

        Raise UserError where a number of rows is needed and not known.
        """
        known = {name: rows_of(name, spec, rows[name]) for name, spec in self.sources.items()}
        if len(known) == 1:
            return dict.fromkeys(known, 1.0)
        shares = {name: spec.weight or 1.0 for name, spec in self.sources.items()} if self.weighted else known
        for name, share in shares.items():
            if share is None:
                raise UserError(
                    f"the files of data.sources.{name} do not tell how many rows they have, "
                    "and without weights sources are mixed by their rows: "
                    "give it `rows` (how many there are, about), or give the sources a `weight`"
                )
        return {name: float(share or 0) ** (1 / self.temperature) for name, share in shares.items()}

    def mixed(self, streams: Mapping[str, Shuffle[Item]], shares: Mapping[str, float], lane: int) -> Mixer[Item]:
        """Return the mixture of the streams that a lane reads."""
        size = length_of if self.by == "tokens" else None
        epochs = {name: spec.epochs for name, spec in self.sources.items()}
        deficits = {name: randint(f"mix/{self.seed}/{lane}/{name}", 0, 1 << 20) / (1 << 20) for name in streams}
        return Mixer(
            streams,
            shares,
            size=size if self.weighted else self.stands_for,
            exhausted=self.ends,
            epochs=epochs,
            initial_deficits=deficits,
        )


def rows_of(name: str, spec: SourceSpec, found: int | None) -> int | None:
    """Return the rows of a source in an epoch: as many as its files have, or the config says.

    Raise UserError where the two differ.
    """
    if found is not None and spec.rows is not None and found != min(spec.rows, spec.limit or spec.rows):
        raise UserError(
            f"data.sources.{name}.rows is {spec.rows}, but its files have {found} rows that count; "
            "without the key they are counted"
        )
    rows = spec.rows if found is None else found
    return rows if rows is None or spec.limit is None else min(rows, spec.limit)


@dataclass(frozen=True)
class Lanes:
    """Makes lanes: by its number, everything that a lane will ever train on, as packed rows.

    The lanes that one process serves read its files together.
    """

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
    reorder: bool = False  # permute the events of a basket each time it is read
    share: bool = False  # compute a prefix that several samples of a row share once
    quarantine: str | None = None  # directory that bad rows are written to; without it they are errors
    max_bad: float = 0.0
    wrap: Callable[[str, Encoder], Encoder] = lambda name, encoder: encoder  # replaces each source's encoder
    _opened: dict[str, tuple[Ordered, SourceSpec]] = field(default_factory=dict)
    _gives_samples: dict[str, bool] = field(default_factory=dict)  # whether any row of a source gives a sample

    def __call__(self, lane: int) -> Lane:
        """Return the lane of this number, from its beginning."""
        encoded, shuffled = {}, {}
        for name in self.sources:
            encoded[name] = each = self._encoded(name, lane)
            shuffled[name] = Shuffle(
                each, self.shuffle, f"shuffle/{self.seed}/{lane}/{name}", epoch_of, each.dump, each.load
            )
        return Lane(encoded, shuffled, self.mixture.mixed(shuffled, self.shares, lane), self.seq_len, self.lookahead)

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

    @property
    def window(self) -> int:
        """About how many rows of a source a lane reads before the first one is trained."""
        return self.shuffle + 2 * self.lookahead

    def opened(self, name: str) -> tuple[Ordered, SourceSpec]:
        """Return a source's files with their order, and its specification with what was detected."""
        if name not in self._opened:
            reader, spec = opened(self.sources[name], self.tokenizer)
            self._opened[name] = (
                Ordered(reader, f"order/{self.seed}/{name}", self.lanes, spec.limit, self.shuffle > 0),
                spec,
            )
        return self._opened[name]

    def _encoded(self, name: str, lane: int) -> Encoded:
        """Return the encoded stream of a source in a lane."""
        ordered, spec = self.opened(name)
        file = f"{self.quarantine}/{name}-{lane:03}.jsonl"
        aside = Quarantine(file, self.max_bad).add if self.quarantine else None
        encoder = encoder_of(name, spec, self.encode, self.seq_len, self.too_long, aside, self.share)
        reorder = f"baskets/{self.seed}/{name}" if self.reorder else None
        source, encoder = ordered.lane(lane, self.window), self.wrap(name, encoder)
        return Encoded(
            name, source, encoder, self.uncounted_encoder(name), self.lanes, lambda: self._has_samples(name), reorder
        )

    def rows(self, name: str) -> int | None:
        """Return the rows of a source in an epoch; None where neither its files nor the config tell."""
        return rows_of(name, self.sources[name], self.opened(name)[0].rows)

    def uncounted_encoder(self, name: str) -> Encoder:
        """Return an encoder for rows that are counted elsewhere."""
        aside = (lambda bad, counts: None) if self.quarantine else None
        return encoder_of(name, self.opened(name)[1], self.encode, self.seq_len, self.too_long, aside, self.share)

    def _has_samples(self, name: str) -> bool:
        """Return whether any row of a source gives a sample."""
        if name not in self._gives_samples:
            ordered, encoder = self.opened(name)[0], self.uncounted_encoder(name)
            self._gives_samples[name] = any(encoder(row) for row in rows_once(ordered.reader, ordered.limit))
        return self._gives_samples[name]


def opened(spec: SourceSpec, tokenizer: Tokenizer | None) -> tuple[Reader, SourceSpec]:
    """Return a reader of the source's rows, and the specification with what was detected."""
    if spec.kind != "tokenized":
        reader = Reader(Location.of(spec))
        return reader, with_detected_kind(spec, reader)
    assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
    return tokenized.reader(spec.path, tokenizer, spec.verify_up_to), spec


def encoder_of(
    name: str,
    spec: SourceSpec,
    encode: Encode,
    seq_len: int,
    too_long: TooLong,
    set_aside: SetAside | None = None,
    share: bool = False,
) -> Encoder:
    """Return the encoder that makes pack units of a source's rows."""
    if spec.kind == "tokenized":
        return tokenized.Decoder(name, seq_len, too_long, share)
    return Encoder(
        encode, name, seq_len, too_long, columns=spec.columns, kind=spec.kind, set_aside=set_aside, share=share
    )


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
        encoder = encoder_of(name, spec, encode, seq_len, too_long, set_aside)
        for place in rows_once(reader, spec.limit):
            yield from encoder(place)


def prompts_once(spec: SourceSpec, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield every prompt of a source once, in file order; its position is its index."""
    for index, place in enumerate(rows_once(Reader(Location.of(spec)), spec.limit)):
        yield _prompt(place.read, place.where, place.columnar, name, spec, tokenizer, index)


def _prompt(
    read: Callable[[], Any], where: str, columnar: bool, name: str, spec: SourceSpec, tokenizer: Tokenizer, index: int
) -> Prompt:
    """Encode a row as a prompt; raise UserError with its place for a bad row."""
    row: Row = {}
    try:
        row = read()
        return encode_prompt(shaped(row, spec.columns, "prompt", columnar), tokenizer, name, index)
    except FAULTS as e:
        raise UserError(f"{where} (source {name}): {reason_of(e, row)}") from (None if isinstance(e, UserError) else e)


class _PromptRow(NamedTuple):
    """A row that will become a prompt, as JSON text, so that a run that reads it again gets an equal one."""

    text: str
    where: str
    source: str
    columnar: bool  # as in Block
    place: tuple[int, int, int, int]  # epoch, file, block, row
    epoch: int
    rows: float = 1.0


class _PromptRows:
    """Stream[_PromptRow]: the rows of a source as text."""

    def __init__(self, name: str, source: LaneSource):
        self._name, self._source = name, source

    def __next__(self) -> _PromptRow:
        return self._text(next(self._source))

    def _text(self, row: Place) -> _PromptRow:
        place = row.epoch, row.file, row.number, row.row
        try:
            return _PromptRow(
                json.dumps(row.read(), default=str), row.where, self._name, row.columnar, place, row.epoch
            )
        except FAULTS as e:
            raise UserError(f"{row.where} (source {self._name}): {reason_of(e, {})}") from (
                None if isinstance(e, UserError) else e
            )

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
            by_place[key] = text = self._text(self._source.at(file, number, row, epoch))
            if zlib.crc32(text.text.encode()) - (1 << 31) != checksum:
                raise UserError(
                    f"{text.where} is not what it was when the checkpoint was written: "
                    "training cannot continue where it stopped"
                )
        return [by_place[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last item; `settle` finishes it."""
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
        self._tokenizer, self._sources, self._index = tokenizer, sources, 0
        self.orders = {
            name: Ordered(Reader(Location.of(spec)), f"prompts/{seed}/{name}", 1, spec.limit, shuffle > 0)
            for name, spec in sources.items()
        }
        streams: dict[str, Shuffle[Any]] = {}
        for name, ordered in self.orders.items():
            texts = _PromptRows(name, ordered.lane(0, shuffle))
            streams[name] = Shuffle(
                texts, shuffle, f"prompts/{seed}/{name}", attrgetter("epoch"), texts.dump, texts.load
            )
        self.mixture = Mixture(sources, seed, temperature, stands_for=attrgetter("rows"))
        self.shares = self.mixture.shares(self.rows)
        self._mixer = self.mixture.mixed(streams, self.shares, 0)

    @property
    def rows(self) -> dict[str, int | None]:
        """Rows of each source; None where the number is not known."""
        return {name: ordered.rows for name, ordered in self.orders.items()}

    def __next__(self) -> Prompt:
        row: Any = next(self._mixer)
        self._index += 1
        return _prompt(
            lambda: json.loads(row.text),
            row.where,
            row.columnar,
            row.source,
            self._sources[row.source],
            self._tokenizer,
            self._index - 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last prompt, written out."""
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
        refuse_other_order(state)
        self._tokenizer.refuse_other(state["tokenizer"], "the checkpoint")
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])


def prompts_stream(
    sources: Mapping[str, SourceSpec], *, tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0
) -> Prompts:
    """Return the stream that an online recipe draws its prompts from."""
    return Prompts(sources, tokenizer, seed, shuffle, temperature)
