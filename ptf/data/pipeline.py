"""The data of a run put together: sources → encode → shuffle → mix → pack, once for each lane; a single pass for validation; prompts.

The one idea: a lane is a pure function of (config, files, lane number), so whoever serves it, from whatever state, yields the same rows. And what waits
in a lane's windows is known by the place it was read from: a state holds places, and whoever goes on from it reads them again.
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
from ptf.data.baskets import redrawn
from ptf.data.blocks import Location, Reader, Row
from ptf.data.encode import COUNTS, Encode, Encoder, SetAside, TooLong, encode_prompt
from ptf.data.items import ROWS, SOURCE, Item, atoms_of, behind, epoch_of, items_of, length_of, place_of, rows_in, stored_items
from ptf.data.kinds import found_out, shaped
from ptf.data.mixer import Mixer
from ptf.data.order import ORDER, LaneSource, Ordered, Ranges, Run
from ptf.data.packing import Packer
from ptf.data.quarantine import FAULTS, Quarantine, reason_of
from ptf.data.sample import Atom
from ptf.data.sources import Place, SourceSpec, rows_once
from ptf.data.stream import Later, Shuffle, Stream, randint, settle
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError


@dataclass(frozen=True, eq=False, slots=True)
class ItemRun:
    """Items of one epoch that follow each other in a lane of tokenized rows, and the state of `Encoded` behind any of them."""

    items: list[Item]
    epoch: int
    rows: Run
    ends: list[int] | None  # how many of the rows are read when each item is taken; None: one a row
    counts: np.ndarray  # [rows + 1, len(COUNTS)] int64: of the encoder, behind so many rows
    before: dict[str, Any]  # state without `source` and `counts`, before the first

    def state(self, n: int) -> dict[str, Any]:
        """Behind the first n items."""
        rows = self._read(n)
        pending = () if self.ends is None else tuple(self.items[k] for k in range(len(self.items) - 1, n - 1, -1) if self.ends[k] == rows)
        taken = {"without": 0, "found": self.epoch} if n else {}
        return self.before | {"source": self.rows.state(rows), "counts": self.counted(n), "pending": Later(pending, dump)} | taken

    def counted(self, n: int) -> dict[str, int]:
        """By the encoder, behind the first n items."""
        return dict(zip(COUNTS, self.counts[self._read(n)].tolist(), strict=True))

    def _read(self, n: int) -> int:
        """Rows, to take the first n items."""
        return n if self.ends is None or not n else self.ends[n - 1]


def dump(items: Sequence[Item]) -> np.ndarray:
    """Places and marks. [items, 7] int32"""
    return np.array([place_of(item) for item in items], np.int32).reshape(-1, 7)


class Encoded:
    """Stream[Item]: the samples of a lane's rows, one after the other. Ends where no row of the lane will ever leave one, though others' do."""

    def __init__(self, name: str, source: LaneSource, encoder: Encoder, again: Encoder, patience: int, somewhere: Callable[[], bool], reorder: str | None):
        """`again` encodes what was encoded before. When `patience` epochs left nothing, `somewhere` is asked whether any row of the source leaves a
        sample. `reorder` names the randomness by which baskets are reordered."""
        self._name, self._source, self._encoder, self._again = name, source, encoder, again
        self._patience, self._somewhere, self._reorder = patience, somewhere, reorder
        self._pending: list[Item] = []  # the next one last
        self._without = 0  # rows without a sample since the last that had one
        self._found = 0  # the epoch of that one
        self._ended = False

    def __next__(self) -> Item:
        while not self._pending:
            if self._ended:
                raise StopIteration
            row = next(self._source)
            if self._without and row.epoch - self._found > self._patience:
                if not self._somewhere():
                    raise UserError(f"no row of {self._source.path} left a sample to train on: {self._encoder.counts}")
                self._ended = True
            self._pending = self._items(row, self._encoder(row), self._without)[::-1]
            self._without = 0 if self._pending else self._without + 1
            if self._pending:
                self._found = row.epoch
        return self._pending.pop()

    def _items(self, row: Place, atoms: Sequence[Atom], without: int) -> list[Item]:
        if self._reorder is not None:
            atoms = [redrawn(atom, f"{self._reorder}/{(row.epoch, row.file, row.number, row.row, i)}") for i, atom in enumerate(atoms)]
        return items_of(atoms, self._name, row.epoch, (row.file, row.number), row.row, without)

    def run(self, most: int) -> ItemRun | None:
        """What `__next__` would give of the next rows, at most so many, without the cost of each row by itself. None where it has to be asked."""
        encoder = self._encoder
        if self._without or self._pending or self._ended or self._reorder or not isinstance(encoder, tokenized.Decoder) or not isinstance(self._source, Ranges):
            return None
        rows = self._source.run(most, encoder.fits)
        if rows is None:
            return None
        before = {"without": self._without, "found": self._found, "ended": False}
        given, told = [], []
        ends: list[int] | None = None
        for head, n in zip(rows.heads, rows.counts(len(rows.order)), strict=True):
            block, first, at = head[3], head[1], (head[5], head[6])
            told.append(block.told[first : first + n])
            if block.simple(first, first + n):
                given.append(iter(stored_items(block, first, first + n, self._name, rows.epoch, at)))
            else:
                ends = []
                given.append(iter([items_of(block.atoms(i), self._name, rows.epoch, at, i, 0) for i in range(first, first + n)]))
        made: list[Any] = list(map(next, map(given.__getitem__, rows.order.tolist())))
        counts = encoder.counted(np.concatenate(told)[_in_turn(rows.order)])
        if ends is not None:
            made, ends = self._flat(made)
        if made:
            self._found = rows.epoch
        encoder.counts = dict(zip(COUNTS, counts[-1].tolist(), strict=True))
        return ItemRun(made, rows.epoch, rows, ends, counts, before)

    def _flat(self, rows: Sequence[Any]) -> tuple[list[Item], list[int]]:
        """The items of rows, each of which is an item or a list of them; and how many rows end with each."""
        made: list[Item] = []
        ends: list[int] = []
        for i, row in enumerate(rows):
            if isinstance(row, tuple):
                row = [row]
            if not row:
                self._without += 1
                continue
            if self._without:
                row = [behind(row[0], self._without), *row[1:]]
                self._without = 0
            made += row
            ends += [i + 1] * len(row)
        return made, ends

    def counts(self) -> Mapping[str, int]:
        return self._encoder.counts

    def dump(self, items: Sequence[Item]) -> np.ndarray:
        return dump(items)

    def load(self, places: np.ndarray) -> list[Item]:
        """The samples of places, read again: every block once. Raises UserError where another sample is there."""
        found: dict[tuple[int, ...], Item] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, i, without, _ = key
            at = self._source.at(file, number, row, epoch)
            items = self._items(at, self._again(at), without)
            if i >= len(items) or place_of(items[i]) != key:
                raise UserError(f"{at.where} is not what it was when the checkpoint was written: training cannot continue where it stopped")
            found[key] = items[i]
        return [found[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self._source.state_dict(), "counts": dict(self._encoder.counts), "pending": Later(tuple(self._pending), self.dump),
            "without": self._without, "found": self._found, "ended": self._ended,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._encoder.counts = {key: int(state["counts"].get(key, 0)) for key in COUNTS}  # an earlier version counted fewer things
        self._without, self._found, self._ended = int(state["without"]), int(state["found"]), bool(state["ended"])
        self._pending = self.load(state["pending"])


def _in_turn(order: np.ndarray) -> np.ndarray:
    """Where in the heads' rows, one head after the other, the rows lie that are read in this order of heads. [rows] int64"""
    at = np.empty(len(order), np.int64)
    at[np.argsort(order, kind="stable")] = np.arange(len(order))
    return at


class Lane:
    """Stream[list[Atom]]: a lane's packed rows, and what its encoders counted."""

    def __init__(self, encoded: Mapping[str, Encoded], shuffled: Mapping[str, Shuffle[Item]], items: Stream[Item], seq_len: int, lookahead: int):
        """`items` are those of `shuffled`, mixed, and those of each are a source's as `encoded`."""
        self._encoded, self._shuffled, self._names = encoded, shuffled, list(encoded)
        self._packer = Packer(items, seq_len, lookahead, length_of, self._dump, self._load)
        self.passed = dict.fromkeys(encoded, 0.0)  # rows of each source that are in the packed rows so far; of no state

    def __iter__(self) -> "Lane":
        return self

    def __next__(self) -> list[Atom]:
        return atoms_of([self.row()])[0]

    def row(self) -> list[Item]:
        """The next row, of which `atoms_of` makes the atoms; of many rows at once for less."""
        row, passed = next(self._packer), self.passed
        for item in row:
            passed[item[SOURCE]] += item[ROWS]
        return row

    def counts(self) -> Mapping[str, int]:
        found = [self._counted(name) for name in self._names]
        return found[0] if len(found) == 1 else {key: sum(counts[key] for counts in found) for key in COUNTS}

    def _counted(self, name: str) -> Mapping[str, int]:
        run, n = self._shuffled[name].taken
        return self._encoded[name].counts() if run is None else cast(ItemRun, run).counted(n)

    def _dump(self, items: Sequence[Item]) -> dict[str, Any]:
        places = {name: encoded.dump([item for item in items if item[SOURCE] == name]) for name, encoded in self._encoded.items()}
        return {"sources": [self._names.index(item[SOURCE]) for item in items], "places": places}

    def _load(self, state: Mapping[str, Any]) -> list[Item]:
        items = {name: iter(encoded.load(state["places"][name])) for name, encoded in self._encoded.items()}
        return [next(items[self._names[i]]) for i in state["sources"]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": ORDER, **self._packer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_other_order(state)
        self._packer.load_state_dict(state)


def refuse_other_order(state: Mapping[str, Any]) -> None:
    """Of a lane, or of prompts."""
    if state.get("order") != ORDER:
        raise UserError("the checkpoint is of a version of ptf that read the data in another order: continue it with that version, or start a new run")


@dataclass(frozen=True)
class Mixture:
    """How several sources make one stream."""

    sources: Mapping[str, SourceSpec]
    seed: int
    temperature: float = 1.0
    by: Literal["samples", "tokens"] = "samples"
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    stands_for: Callable[[Any], float] = rows_in  # rows of the source

    @property
    def weighted(self) -> bool:
        """Whether the sources have the shares that their weights say. Else every row comes once an epoch, and a source ends when it is done."""
        return any(spec.weight is not None for spec in self.sources.values())

    @property
    def ends(self) -> Literal["repeat", "drop", "stop"]:
        """What happens when a source has had its epochs."""
        return self.exhausted if self.weighted else "drop"

    @property
    def endless(self) -> bool:
        ending = [spec.epochs is not None for spec in self.sources.values()]
        return not (any(ending) if self.ends == "stop" else all(ending))

    def shares(self, rows: Mapping[str, int | None]) -> dict[str, float]:
        """Of each source, in proportion; `rows` are what the files tell. Raises UserError where a number of rows is needed and not known."""
        known = {name: rows_of(name, spec, rows[name]) for name, spec in self.sources.items()}
        if len(known) == 1:
            return dict.fromkeys(known, 1.0)
        found = {name: spec.weight or 1.0 for name, spec in self.sources.items()} if self.weighted else known
        for name, share in found.items():
            if share is None:
                raise UserError(
                    f"the files of data.sources.{name} do not tell how many rows they have, and without weights sources are mixed by their rows: "
                    f"give it `rows` (how many there are, about), or give the sources a `weight`"
                )
        return {name: float(share or 0) ** (1 / self.temperature) for name, share in found.items()}

    def mixed(self, streams: Mapping[str, Shuffle[Item]], shares: Mapping[str, float], lane: int) -> Mixer[Item]:
        """What a lane reads of them."""
        size = length_of if self.by == "tokens" else None
        epochs = {name: spec.epochs for name, spec in self.sources.items()}
        ahead = {name: randint(f"mix/{self.seed}/{lane}/{name}", 0, 1 << 20) / (1 << 20) for name in streams}
        return Mixer(streams, shares, size=size if self.weighted else self.stands_for, exhausted=self.ends, epochs=epochs, ahead=ahead)


def rows_of(name: str, spec: SourceSpec, found: int | None) -> int | None:
    """Rows of a source in an epoch: as many as its files tell, or the config. Raises UserError where the two differ."""
    if found is not None and spec.rows is not None and found != min(spec.rows, spec.limit or spec.rows):
        raise UserError(f"data.sources.{name}.rows is {spec.rows}, but its files have {found} rows that count; without the key they are counted")
    told = spec.rows if found is None else found
    return told if told is None or spec.limit is None else min(told, spec.limit)


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
    share: bool = False  # what the samples of a row begin with alike is read once
    quarantine: str | None = None  # directory of the bad rows; without it they are errors
    max_bad: float = 0.0
    wrap: Callable[[str, Encoder], Encoder] = lambda name, encoder: encoder  # in place of each source's encoder
    _opened: dict[str, tuple[Ordered, SourceSpec]] = field(default_factory=dict)
    _left: dict[str, bool] = field(default_factory=dict)  # whether any row of a source leaves a sample

    def __call__(self, lane: int) -> Lane:
        encoded, shuffled = {}, {}
        for name in self.sources:
            encoded[name] = each = self._encoded(name, lane)
            shuffled[name] = Shuffle(each, self.shuffle, f"shuffle/{self.seed}/{lane}/{name}", epoch_of, each.dump, each.load)
        return Lane(encoded, shuffled, self.mixture.mixed(shuffled, self.shares, lane), self.seq_len, self.lookahead)

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(self.sources, self.seed, self.temperature, self.by, self.exhausted)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        return self.mixture.shares({name: self.opened(name)[0].rows for name in self.sources})

    @property
    def endless(self) -> bool:
        return self.mixture.endless

    @property
    def window(self) -> int:
        """Rows of a source that a lane reads before the first one is trained, about."""
        return self.shuffle + 2 * self.lookahead

    def opened(self, name: str) -> tuple[Ordered, SourceSpec]:
        """A source's files and their order, and what its rows are."""
        if name not in self._opened:
            reader, spec = opened(self.sources[name], self.tokenizer)
            self._opened[name] = Ordered(reader, f"order/{self.seed}/{name}", self.lanes, spec.limit, self.shuffle > 0), spec
        return self._opened[name]

    def _encoded(self, name: str, lane: int) -> Encoded:
        ordered, spec = self.opened(name)
        file = f"{self.quarantine}/{name}-{lane:03}.jsonl"
        aside = Quarantine(file, self.max_bad).add if self.quarantine else None
        encoder = encoder_of(name, spec, self.encode, self.seq_len, self.too_long, aside, self.share)
        reorder = f"baskets/{self.seed}/{name}" if self.reorder else None
        source, encoder = ordered.lane(lane, self.window), self.wrap(name, encoder)
        return Encoded(name, source, encoder, self.again(name), self.lanes, lambda: self._leaves_some(name), reorder)

    def rows(self, name: str) -> int | None:
        """Of a source in an epoch; None where neither its files nor the config tell."""
        return rows_of(name, self.sources[name], self.opened(name)[0].rows)

    def again(self, name: str) -> Encoder:
        """An encoder for rows that count elsewhere."""
        aside = (lambda bad, counts: None) if self.quarantine else None
        return encoder_of(name, self.opened(name)[1], self.encode, self.seq_len, self.too_long, aside, self.share)

    def _leaves_some(self, name: str) -> bool:
        if name not in self._left:
            ordered, again = self.opened(name)[0], self.again(name)
            self._left[name] = any(again(row) for row in rows_once(ordered.reader, ordered.limit))
        return self._left[name]


def opened(spec: SourceSpec, tokenizer: Tokenizer | None) -> tuple[Reader, SourceSpec]:
    """Its rows, and what they are."""
    if spec.kind != "tokenized":
        reader = Reader(Location.of(spec))
        return reader, found_out(spec, reader)
    assert tokenizer is not None, "a tokenized source is read with the tokenizer that it must have been written with"
    return tokenized.reader(spec.path, tokenizer, spec.verify_up_to), spec


def encoder_of(name: str, spec: SourceSpec, encode: Encode, seq_len: int, too_long: TooLong, set_aside: SetAside | None = None, share: bool = False) -> Encoder:
    """What makes atoms of a source's rows."""
    if spec.kind == "tokenized":
        return tokenized.Decoder(name, seq_len, too_long, share)
    return Encoder(encode, name, seq_len, too_long, columns=spec.columns, kind=spec.kind, set_aside=set_aside, share=share)


def atoms_once(
    sources: Mapping[str, SourceSpec], *, encode: Encode, seq_len: int, too_long: TooLong = "error", tokenizer: Tokenizer | None = None,
    set_aside: SetAside | None = None,
) -> Iterator[Atom]:  # fmt: skip
    """Every atom of every source once, in file order: held-out data. Tokenized sources need `tokenizer`, to check that they were written with it. A bad
    row is an error, unless there is somewhere to set it aside."""
    for name, spec in sources.items():
        reader, spec = opened(spec, tokenizer)
        encoder = encoder_of(name, spec, encode, seq_len, too_long, set_aside)
        for place in rows_once(reader, spec.limit):
            yield from encoder(place)


def prompts_once(spec: SourceSpec, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Every prompt of a source once, in file order; its place is its index."""
    for index, place in enumerate(rows_once(Reader(Location.of(spec)), spec.limit)):
        yield _prompt(place.read, place.where, place.columnar, name, spec, tokenizer, index)


def _prompt(read: Callable[[], Any], where: str, columnar: bool, name: str, spec: SourceSpec, tokenizer: Tokenizer, index: int) -> Prompt:
    row: Row = {}
    try:
        row = read()
        return encode_prompt(shaped(row, spec.columns, "prompt", columnar), tokenizer, name, index)
    except FAULTS as e:
        raise UserError(f"{where} (source {name}): {reason_of(e, row)}") from (None if isinstance(e, UserError) else e)


class _Text(NamedTuple):
    """A row on its way to become a prompt, as JSON text, so that a run that reads it again sees an equal one."""

    text: str
    where: str
    source: str
    columnar: bool  # see Block
    place: tuple[int, int, int, int]  # epoch, file, block, row
    epoch: int
    rows: float = 1.0


class _Texts:
    """Stream[_Text]"""

    def __init__(self, name: str, source: LaneSource):
        self._name, self._source = name, source

    def __next__(self) -> _Text:
        return self._text(next(self._source))

    def _text(self, row: Place) -> _Text:
        place = row.epoch, row.file, row.number, row.row
        try:
            return _Text(json.dumps(row.read(), default=str), row.where, self._name, row.columnar, place, row.epoch)
        except FAULTS as e:
            raise UserError(f"{row.where} (source {self._name}): {reason_of(e, {})}") from (None if isinstance(e, UserError) else e)

    def dump(self, rows: Sequence[_Text]) -> np.ndarray:
        """Places and checksums. [rows, 5] int32"""
        return np.array([(*row.place, zlib.crc32(row.text.encode()) - (1 << 31)) for row in rows], np.int32).reshape(-1, 5)

    def load(self, places: np.ndarray) -> list[_Text]:
        found: dict[tuple[int, ...], _Text] = {}
        for key in sorted({tuple(place) for place in places.tolist()}):
            epoch, file, number, row, mark = key
            found[key] = text = self._text(self._source.at(file, number, row, epoch))
            if zlib.crc32(text.text.encode()) - (1 << 31) != mark:
                raise UserError(f"{text.where} is not what it was when the checkpoint was written: training cannot continue where it stopped")
        return [found[tuple(place)] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


class Prompts:
    """Stream[Prompt]: endless, shuffled, mixed: without weights, every row of every source comes once before any comes again."""

    def __init__(self, sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0):
        self._tokenizer, self._sources, self._index = tokenizer, sources, 0
        self.orders = {name: Ordered(Reader(Location.of(spec)), f"prompts/{seed}/{name}", 1, spec.limit, shuffle > 0) for name, spec in sources.items()}
        streams: dict[str, Shuffle[Any]] = {}
        for name, ordered in self.orders.items():
            texts = _Texts(name, ordered.lane(0, shuffle))
            streams[name] = Shuffle(texts, shuffle, f"prompts/{seed}/{name}", attrgetter("epoch"), texts.dump, texts.load)
        self.mixture = Mixture(sources, seed, temperature, stands_for=attrgetter("rows"))
        self.shares = self.mixture.shares(self.rows)
        self._mixer = self.mixture.mixed(streams, self.shares, 0)

    @property
    def rows(self) -> dict[str, int | None]:
        """Of each source; None where it is not known."""
        return {name: ordered.rows for name, ordered in self.orders.items()}

    def __next__(self) -> Prompt:
        row: Any = next(self._mixer)
        self._index += 1
        return _prompt(lambda: json.loads(row.text), row.where, row.columnar, row.source, self._sources[row.source], self._tokenizer, self._index - 1)

    def state_dict(self) -> dict[str, Any]:
        return settle({"order": ORDER, "index": self._index, "tokenizer": self._tokenizer.identity, "mixer": self._mixer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_other_order(state)
        self._tokenizer.refuse_other(state["tokenizer"], "the checkpoint")
        self._index = int(state["index"])
        self._mixer.load_state_dict(state["mixer"])


def prompts_stream(sources: Mapping[str, SourceSpec], *, tokenizer: Tokenizer, seed: int, shuffle: int, temperature: float = 1.0) -> Prompts:
    """What an online recipe draws its prompts from."""
    return Prompts(sources, tokenizer, seed, shuffle, temperature)
