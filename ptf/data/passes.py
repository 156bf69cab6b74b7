"""What a run takes of its data, before it begins: its steps, and how often it passes over each source.

The one idea: both follow from the lengths of the samples alone, so the very lanes of the run are read with samples that have a length and no tokens:
of tokenized sources only the lengths are read, rows of others are encoded once. Where that would be too much, a few rows tell about all, and the
numbers are intervals.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ptf.data import tokenized
from ptf.data.encode import Encoder
from ptf.data.order import Ordered
from ptf.data.packing import pack_all
from ptf.data.pipeline import Lanes, Prompts, rows_of
from ptf.data.sample import Atom, length
from ptf.data.sources import Place, rows_once
from ptf.data.token_file import hollow

FEW_ROWS = 100_000  # that are not tokenized and are encoded for an exact number
FEW_SAMPLES = 2_000_000  # of a run that are packed for one
SAMPLED = 1000  # rows of each source, where an interval must do
BLOCKS = "in blocks that are permuted each epoch, several at a time"
LEAST = 0.05  # of an interval on each side: the first rows of a source are like the others only so far


@dataclass(frozen=True, slots=True)
class Planned:
    """Of a whole run. Each number is a lowest and a highest, alike where `exact`."""

    steps: tuple[int, int]
    passes: Mapping[str, tuple[float, float] | None]  # over each source; None where its number of rows is not known
    exact: bool

    @property
    def steps_exact(self) -> bool:
        return self.steps[0] == self.steps[1]

    def said(self) -> str:
        """In a line."""
        number = lambda low, high, form: form.format(low) if low == high else f"{form.format(low)} to {form.format(high)}"  # noqa: E731
        each = [f"{name} {number(*found, '{:.3g}') if found else 'an unknown number'}" for name, found in self.passes.items()]
        return f"passes over the data: {', '.join(each)}; steps: {number(*self.steps, '{:,}')}" + ("" if self.exact else " (estimated)")


@dataclass(frozen=True, slots=True)
class Part:
    """What some of the lanes take."""

    ends: int  # rows of the run up to the last that one of them gives
    rows: Mapping[str, float]  # of each source
    complete: bool  # else only a part of each was looked at, and `rows` are in proportion


def by_lengths(lanes: Lanes) -> Lanes:
    """The same lanes, whose samples have lengths, and no tokens."""
    sources = {name: lanes.opened(name) for name in lanes.sources}
    opened = {}
    for name, (ordered, spec) in sources.items():
        if spec.kind == "tokenized" and not lanes.share:  # what is shared follows from the tokens
            ordered = replaced(ordered, tokenized.lengths_reader(ordered.reader))
        opened[name] = ordered, spec
    cached = {name: _Cached() for name, spec in lanes.sources.items() if spec.kind != "tokenized"}
    wrap = lambda name, encoder: cached[name].of(encoder) if name in cached else encoder  # noqa: E731
    return replace(lanes, _opened=opened, reorder=False, wrap=wrap)


def replaced(ordered: Ordered, reader: Any) -> Ordered:
    """The same order of another reader of the same files."""
    return Ordered(reader, ordered.key, ordered.lanes, ordered.limit, ordered.shuffled)


class _Cached:
    """Encoders that encode a row once, and keep the lengths of its samples."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def of(self, encoder: Encoder) -> Any:
        return _Once(encoder, self._lengths)


class _Once:
    def __init__(self, encoder: Encoder, lengths: dict[tuple[int, int, int], tuple[int, ...]]):
        self._encoder, self._lengths = encoder, lengths
        self.counts = encoder.counts

    def __call__(self, row: Place) -> list[Atom]:
        key = row.file, row.number, row.row
        if key not in self._lengths:
            self._lengths[key] = tuple(map(length, self._encoder(row)))
        return [hollow(n) for n in self._lengths[key]]


def part(lanes: Lanes, served: range, rows: int | None) -> Part:
    """What the served lanes take until they end, or in a run of so many `rows` in all. Raises what encoding raises."""
    factory, most = by_lengths(lanes), FEW_SAMPLES // lanes.lanes
    ends, found, complete = 0, dict.fromkeys(lanes.sources, 0.0), True
    for lane in served:
        stream, wanted = factory(lane), None if rows is None else max(0, -(-(rows - lane) // lanes.lanes))
        given = samples = 0
        for row in islice(stream, wanted):
            given += 1
            samples += len(row)
            if wanted is not None and samples > most:
                break
        if wanted is not None and samples > most:
            complete = False
            found = {name: n + stream.passed[name] * wanted / given for name, n in found.items()}
            given = wanted
        else:
            found = {name: n + stream.passed[name] for name, n in found.items()}
        if given:
            ends = max(ends, lane + (given - 1) * lanes.lanes + 1)
    return Part(ends, found, complete)


def is_few(lanes: Lanes, few: int | None = None) -> bool:
    """Whether an exact number is worth encoding what it takes; `few` rows (FEW_ROWS) are."""
    rows = [lanes.rows(name) for name, spec in lanes.sources.items() if spec.kind != "tokenized"]
    return all(n is not None for n in rows) and sum(n or 0 for n in rows) <= (FEW_ROWS if few is None else few)


def planned(
    lanes: Lanes, rows: int, steps: int | None, *, served: range | None = None, total: Callable[[list[float]], list[float]] = list,
    most: Callable[[float], float] = float, exact: bool | None = None,
) -> Planned:  # fmt: skip
    """Of a run of `steps` steps at most, each of so many packed `rows`. In a gang, every rank looks at the lanes that it `served`; `total` and `most` are
    then the sum and the largest over all ranks. `exact`: whatever it costs; by default where it costs little."""
    if not (is_few(lanes) if exact is None else exact):
        return estimated(lanes, rows, steps)
    found = part(lanes, range(lanes.lanes) if served is None else served, None if steps is None else steps * rows)
    *taken, incomplete = total([*found.rows.values(), float(not found.complete)])
    ends = -(-int(most(found.ends)) // rows)
    steps = ends if steps is None else min(steps, ends)
    off = LEAST / 5 if incomplete else 0.0  # what is periodic was looked at for a while
    passes: dict[str, tuple[float, float] | None] = {}
    for name, n in zip(lanes.sources, taken, strict=True):
        known = lanes.rows(name)
        passes[name] = (n / known * (1 - off), n / known * (1 + off)) if known else None
    return Planned((steps, steps), passes, not incomplete)


def of_prompts(prompts: Prompts, in_step: int, steps: int) -> Planned:
    """Of an online run that draws so many prompts in a step. Prompts that are drawn in place of others come on top."""
    share, all_of = prompts.shares, sum(prompts.shares.values())
    passes: dict[str, tuple[float, float] | None] = {}
    for name, spec in prompts.mixture.sources.items():
        rows = rows_of(name, spec, prompts.rows[name])
        found = steps * in_step * share[name] / all_of / rows if rows else None
        passes[name] = None if found is None else (found, found)
    return Planned((steps, steps), passes, True)


def order_of(ordered: Ordered) -> str:
    """In which order a source is read."""
    if not ordered.shuffled:
        return "in the order of the files (data.shuffle: 0)"
    if ordered.by_block:
        return BLOCKS
    return "files permuted whole each epoch, each read from its beginning to its end: they are compressed, or lines in a store"


def estimated(lanes: Lanes, rows: int, steps: int | None) -> Planned:
    """From the first rows of each source."""
    looked = {name: list(_looked(lanes, name)) for name in lanes.sources}
    per_row = {name: _mean([sum(row) for row in found]) for name, found in looked.items()}  # tokens in a row of the source, and how far off that may be
    per_sample = {name: _mean([n for row in found for n in row])[0] or 1.0 for name, found in looked.items()}
    flat = [hollow(n) for found in looked.values() for row in found for n in row]
    order = np.random.default_rng(0).permutation(len(flat))
    packed = pack_all((flat[i] for i in order), lanes.seq_len, lanes.lookahead)
    full = packed[: max(1, len(packed) - lanes.lookahead // 4)]
    room = rows * max(1.0, sum(length(atom) for row in full for atom in row) / max(1, len(full)))  # tokens in a step
    shares, mixture = lanes.shares, lanes.mixture
    if mixture.weighted:  # in rows of the source
        unit = {name: 1.0 if mixture.by == "tokens" else per_sample[name] for name in shares}
        shares = {name: share * unit[name] / (per_row[name][0] or 1.0) for name, share in shares.items()}
    known = {name: lanes.rows(name) for name in lanes.sources}
    wanted = {name: float(spec.epochs) if spec.epochs else None for name, spec in lanes.sources.items()}
    ends = [wanted[name] * known[name] / shares[name] for name in shares if wanted[name] and known[name]]  # type: ignore[operator]
    ending = (min if mixture.ends == "stop" else max)(ends) if ends and not mixture.endless else None
    taken: dict[str, float] = {}
    for name, share in shares.items():
        bound, rows_there = wanted[name], known[name]
        taken[name] = share * (ending if ending is not None else 1.0)
        if mixture.ends == "drop" and bound and rows_there:
            taken[name] = bound * rows_there
    tokens = sum(taken[name] * per_row[name][0] for name in taken)
    off = max(LEAST, sum(taken[name] * per_row[name][1] for name in taken) / max(1.0, tokens))
    if ending is None:
        assert steps is not None, "the schema lets no endless data train without train.steps"
        scale, low, high = steps * room / max(1.0, tokens), steps, steps
        taken = {name: n * scale for name, n in taken.items()}
    else:
        low, high = max(1, int(tokens * (1 - off) / room)), -(-int(tokens * (1 + off)) // int(room))
        if steps is not None and steps < high:
            taken = {name: n * min(1.0, steps * room / max(1.0, tokens)) for name, n in taken.items()}
            low, high = min(steps, low), steps
    spread = 0.0 if ending is not None and steps is None and mixture.ends == "drop" else off
    passes: dict[str, tuple[float, float] | None] = {}
    for name, n in taken.items():
        there = known[name]
        passes[name] = (n / there * (1 - spread), n / there * (1 + spread)) if there else None
    return Planned((low, high), passes, False)


def _looked(lanes: Lanes, name: str) -> Iterator[list[int]]:
    """Lengths of the samples of each of the first rows."""
    ordered, encoder = lanes.opened(name)[0], lanes.again(name)
    for row in islice(rows_once(ordered.reader, ordered.limit), SAMPLED):
        yield [length(atom) for atom in encoder(row)]


def _mean(values: list[int]) -> tuple[float, float]:
    """And three standard errors of it."""
    if not values:
        return 0.0, 0.0
    return float(np.mean(values)), 3 * float(np.std(values)) / len(values) ** 0.5
