"""The length of a run, computed before it begins: its steps, and how often it passes over each source.

Both depend on the lengths of the samples alone. Therefore the run's own shuffling and packing are replayed with samples
that have a length and no tokens. Tokenized sources have the lengths; rows of other sources are encoded once. Where that
would cost too much, the lengths of the first rows stand for all, and the numbers are intervals.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ptf.data.document import PackUnit, length
from ptf.data.encode import Encoder
from ptf.data.mixture import rows_of
from ptf.data.order import Ordered
from ptf.data.packing import pack_sample
from ptf.data.partitions import Partitions
from ptf.data.prompts import Prompts
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, blocks_once
from ptf.data.token_file import LengthRows, placeholder_unit

FEW_ROWS = 100_000  # up to so many rows that are not tokenized are encoded for an exact number
FEW_SAMPLES = 2_000_000  # up to so many samples of a run are packed for an exact number
SAMPLED = 1000  # rows of each source that are read for an estimate
BLOCKS = "in blocks that are permuted each epoch, several at a time"
LEAST_MARGIN = (
    0.05  # relative, on each side of an estimate: the first rows of a source are only roughly like the others
)


@dataclass(frozen=True, slots=True)
class DataPlan:
    """Steps and passes of a whole run. Each number is a lowest and a highest, equal where `exact`."""

    steps: tuple[int, int]
    passes: Mapping[str, tuple[float, float] | None]  # over each source; None where its number of rows is not known
    exact: bool

    def describe(self) -> str:
        """Return the plan as one line of text."""
        passes = ", ".join(
            f"{name} {' to '.join(f'{n:.3g}' for n in dict.fromkeys(found)) if found else 'an unknown number'}"
            for name, found in self.passes.items()
        )
        steps = " to ".join(f"{n:,}" for n in dict.fromkeys(self.steps))
        return f"passes over the data: {passes}; steps: {steps}{'' if self.exact else ' (estimated)'}"


def partitions_of_lengths(partitions: Partitions) -> Partitions:
    """Return the same partitions with samples that have lengths and no tokens."""
    opened = {name: partitions.opened(name) for name in partitions.sources}
    for name, (ordered, spec) in opened.items():
        if spec.kind == "tokenized" and not partitions.share_prefixes:  # shared prefixes depend on the tokens
            reader = Reader(ordered.reader.path, LengthRows, ["units", "lengths"])
            opened[name] = Ordered(reader, ordered.key, ordered.partitions, ordered.window, ordered.limit), spec
    lengths: dict[str, Lengths] = {name: {} for name, spec in partitions.sources.items() if spec.kind != "tokenized"}
    return replace(
        partitions,
        _opened=opened,
        wrap=lambda name, encoder: (
            _CachedEncoder(encoder, lengths[name], encoder.counts) if name in lengths else encoder
        ),
    )


Lengths = dict[tuple[int, int, int], tuple[int, ...]]  # file, block and row → the lengths of its samples


@dataclass(eq=False)
class _CachedEncoder:
    """An encoder that returns samples without tokens. It encodes a row once, and keeps the lengths in `lengths`."""

    encoder: Encoder
    lengths: Lengths
    counts: dict[str, int]  # those of `encoder`

    def __call__(self, row: RawRow) -> list[PackUnit]:
        key = row.file, row.block, row.row
        if key not in self.lengths:
            self.lengths[key] = tuple(map(length, self.encoder(row)))
        return [placeholder_unit(n) for n in self.lengths[key]]


def rows_taken(partitions: Partitions, served: range, sequences: int | None) -> tuple[int, Mapping[str, float], bool]:
    """Return what the served partitions take until they end, or in a run of `sequences` packed sequences: the
    sequences of the run up to their last one, the rows of each source, and whether all was read.

    Otherwise the rows are extrapolated. `sequences` counts those of all partitions. Raise what encoding raises.
    """
    factory, most = partitions_of_lengths(partitions), FEW_SAMPLES // partitions.partitions
    ends, taken, complete = 0, dict.fromkeys(partitions.sources, 0.0), True
    for partition in served:
        stream, wanted = (
            factory(partition),
            None if sequences is None else max(0, -(-(sequences - partition) // partitions.partitions)),
        )
        given = samples = 0
        for sequence in islice(stream, wanted):
            given += 1
            samples += len(sequence)
            if wanted is not None and samples > most:
                break
        scale = 1.0
        if wanted is not None and samples > most:
            complete, scale, given = False, wanted / given, wanted
        taken = {name: n + stream.passed[name] * scale for name, n in taken.items()}
        if given:
            ends = max(ends, partition + (given - 1) * partitions.partitions + 1)
    return ends, taken, complete


def is_cheap(partitions: Partitions, few: int | None = None) -> bool:
    """Return whether the rows to encode are few enough for exact numbers: at most `few` (default FEW_ROWS)."""
    most = FEW_ROWS if few is None else few
    rows = [rows_up_to(partitions, name, most) for name, spec in partitions.sources.items() if spec.kind != "tokenized"]
    return all(n is not None for n in rows) and sum(n or 0 for n in rows) <= most


def rows_up_to(partitions: Partitions, name: str, most: int) -> int | None:
    """Return the rows of a source in an epoch; None where there are more than `most`.

    Rows of files that do not know their number (compressed ones) are counted.
    """
    known = partitions.rows(name)
    if known is not None:
        return known
    reader, counted = partitions.opened(name)[0].reader, 0
    for rows, *_ in blocks_once(reader):
        counted += len(rows)
        if counted > most:
            return None
    return counted


def planned(
    partitions: Partitions,
    sequences: int,
    steps: int | None,
    *,
    served: range | None = None,
    total: Callable[[list[float]], list[float]] = list,
    most: Callable[[float], float] = float,
    exact: bool | None = None,
) -> DataPlan:
    """Return the plan of a run of at most `steps` steps, each of `sequences` packed sequences.

    In a gang, every rank reads the partitions that it `served`; `total` and `most` are then the sum and the largest
    over all ranks. `exact` forces exact numbers whatever they cost; by default they are exact where they cost little.
    """
    if not (is_cheap(partitions) if exact is None else exact):
        return estimated(partitions, sequences, steps)
    most_sequences = None if steps is None else steps * sequences
    served = range(partitions.partitions) if served is None else served
    own_end, rows, complete = rows_taken(partitions, served, most_sequences)
    *taken, incomplete = total([*rows.values(), float(not complete)])
    ends = -(-int(most(own_end)) // sequences)
    steps = ends if steps is None else min(steps, ends)
    margin = LEAST_MARGIN / 5 if incomplete else 0.0  # the sources take turns, and only a part of the run was read
    known = {name: rows_up_to(partitions, name, FEW_ROWS) for name in partitions.sources}
    of_source = dict(zip(partitions.sources, taken, strict=True))
    return DataPlan((steps, steps), _passes(of_source, known, margin), not incomplete)


def plan_prompts(prompts: Prompts, in_step: int, steps: int) -> DataPlan:
    """Return the plan of an online run that draws `in_step` prompts in a step.

    Prompts that are drawn to replace others are not counted.
    """
    share, all_of = prompts.shares, sum(prompts.shares.values())
    taken = {name: steps * in_step * share[name] / all_of for name in share}
    known = {name: rows_of(name, spec, prompts.rows[name]) for name, spec in prompts.mixture.sources.items()}
    return DataPlan((steps, steps), _passes(taken, known, 0.0), True)


def _passes(
    taken: Mapping[str, float], known: Mapping[str, float | None], margin: float
) -> dict[str, tuple[float, float] | None]:
    """Return the passes over each source, of whose `known` rows so many are taken, with the margin on either side."""
    return {
        name: (n / rows * (1 - margin), n / rows * (1 + margin)) if (rows := known[name]) else None
        for name, n in taken.items()
    }


def describe_order(ordered: Ordered) -> str:
    """Describe the order in which a source is read."""
    if not ordered.window:
        return "in the order of the files (data.shuffle_buffer: 0)"
    if ordered.by_block:
        return BLOCKS
    return (
        "by whole files that are permuted each epoch, each from its beginning to its end, because they are "
        "compressed, or lines in a store"
    )


def estimated(partitions: Partitions, sequences: int, steps: int | None) -> DataPlan:
    """Estimate the plan from the first rows of each source."""
    sampled = {
        name: [list(map(length, encode(row))) for row in partitions.first_rows(name, SAMPLED)]
        for name in partitions.sources
        for encode in [partitions.uncounted_encoder(name)]
    }
    # tokens in a row of the source, and the margin of error
    per_row = {name: _mean([sum(row) for row in counts]) for name, counts in sampled.items()}
    per_sample = {name: _mean([n for row in counts for n in row])[0] or 1.0 for name, counts in sampled.items()}
    flat = [placeholder_unit(n) for counts in sampled.values() for row in counts for n in row]
    full = pack_sample(flat, partitions.seq_len, partitions.lookahead)
    # tokens in a step
    room = sequences * max(1.0, sum(length(unit) for sequence in full for unit in sequence) / max(1, len(full)))
    shares, mixture = partitions.shares, partitions.mixture
    if mixture.weighted:  # in rows of the source
        unit = {name: 1.0 if mixture.by == "tokens" else per_sample[name] for name in shares}
        shares = {name: share * unit[name] / (per_row[name][0] or 1.0) for name, share in shares.items()}
    # for compressed files, estimated from what was read of them
    known = {name: partitions.rows(name) or partitions.opened(name)[0].reader.rows for name in partitions.sources}
    wanted = {name: float(spec.epochs) if spec.epochs else None for name, spec in partitions.sources.items()}
    ends = [epochs * n / share for name, share in shares.items() if (epochs := wanted[name]) and (n := known[name])]
    ending = (min if mixture.ends == "stop" else max)(ends) if ends and not mixture.endless else None
    taken: dict[str, float] = {}
    for name, share in shares.items():
        bound, rows_there = wanted[name], known[name]
        taken[name] = share * (ending if ending is not None else 1.0)
        if mixture.ends == "drop" and bound and rows_there:
            taken[name] = bound * rows_there
    tokens = sum(taken[name] * per_row[name][0] for name in taken)
    margin = max(LEAST_MARGIN, sum(taken[name] * per_row[name][1] for name in taken) / max(1.0, tokens))
    if ending is None:
        assert steps is not None, "the schema lets no endless data train without train.steps"
        scale, low, high = steps * room / max(1.0, tokens), steps, steps
        taken = {name: n * scale for name, n in taken.items()}
    else:
        low, high = max(1, int(tokens * (1 - margin) / room)), -(-int(tokens * (1 + margin)) // int(room))
        if steps is not None and steps < high:
            taken = {name: n * min(1.0, steps * room / max(1.0, tokens)) for name, n in taken.items()}
            low, high = min(steps, low), steps
    spread = 0.0 if ending is not None and steps is None and mixture.ends == "drop" else margin
    return DataPlan((low, high), _passes(taken, known, spread), False)


def _mean(values: list[int]) -> tuple[float, float]:
    """Return the mean of the values, and three standard errors of it."""
    if not values:
        return 0.0, 0.0
    return float(np.mean(values)), 3 * float(np.std(values)) / len(values) ** 0.5
