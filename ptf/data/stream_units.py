"""A stream unit is what the streams of a partition yield: a pack unit, with its length and the place that it was read
from.

Stream units of tokenized rows have, instead of the pack unit, the range of the block's tokens that the unit is made of.

A stream unit is a plain tuple, and that of a tokenized row holds only arrays, numbers and strings. The garbage
collector stops tracking such tuples, which are made many at a time; it would search thousands of class instances in the
windows for reference cycles again and again.
"""

import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from ptf.data.documents import Documents
from ptf.data.sample import PackUnit, build_samples, length
from ptf.data.token_file import NO_COLUMNS, TokenRows, unmarked

StreamUnit = tuple[Any, ...]

UNIT = 0  # the pack unit; None where its only sample lies in a block of tokenized rows, see below
LENGTH = 1  # tokens
SOURCE = 2  # the source that the row was read from
EPOCH = 3
FILE_BLOCK = 4  # numbers of the file and of the block in it
ROW = 5
INDEX = 6  # the number of the unit among the row's units
EMPTY_BEFORE = 7  # rows just before it that gave no unit
ROWS = 8  # rows that the unit stands for: the rows EMPTY_BEFORE, and the unit's share of its own row
TOKENS, WEIGHTS = 9, 10  # tokens of the whole block, and their weights; None where the tokens are marked (`unmarked`)
START, END = 11, 12  # the range of the sample's tokens in the block
SAMPLE_SOURCE = 13  # the source of the sample itself

epoch_of, length_of, rows_in = itemgetter(EPOCH), itemgetter(LENGTH), itemgetter(ROWS)


def stream_units_of(
    units: Sequence[PackUnit], source: str, epoch: int, at: tuple[int, int], row: int, before: int
) -> list[StreamUnit]:
    """Return the stream units of one row's pack units."""
    n = len(units)
    return [
        (unit, length(unit), source, epoch, at, row, i, 0 if i else before, (0 if i else before) + 1 / n)
        for i, unit in enumerate(units)
    ]


def stored_units(
    block: TokenRows, first: int, end: int, source: str, epoch: int, at: tuple[int, int]
) -> list[StreamUnit]:
    """Return the stream units of rows of a block, each of which has one unit of one sample without columns."""
    cuts, own = block.spans(first, end)
    lengths = block.row_counts[first:end, 1].tolist()
    fields: list[Iterable[Any]] = [
        repeat(None),
        lengths,
        repeat(source),
        repeat(epoch),
        repeat(at),
        range(first, end),
        repeat(0),
        repeat(0),
        repeat(1.0),
    ]
    fields += [repeat(block.bytes), repeat(block.weights), cuts, cuts[1:], own]
    return list(zip(*fields))  # noqa: B905  repeat is endless


def after_empty_rows(item: StreamUnit, before: int) -> StreamUnit:
    """Return a row's first stream unit, recording that `before` rows just before the row gave no stream unit."""
    return (*item[:EMPTY_BEFORE], before, before + item[ROWS], *item[TOKENS:])


def units_of(sequences: Sequence[Sequence[StreamUnit]]) -> list[list[PackUnit]]:
    """Return the pack units of sequences of stream units."""
    flat = [item for sequence in sequences for item in sequence if item[UNIT] is None]
    if not flat:
        return [[item[UNIT] for item in sequence] for sequence in sequences]
    tokens, weights = _contents(flat)
    cuts = [*pairwise([0, *accumulate(map(length_of, flat))])]
    stored = build_samples(
        [tokens[start:end] for start, end in cuts],
        [weights[start:end] for start, end in cuts],
        [item[SAMPLE_SOURCE] for item in flat],
        [NO_COLUMNS] * len(flat),
    )
    if len(flat) == sum(map(len, sequences)):
        units = zip(stored)
        return [[next(units) for _ in sequence] for sequence in sequences]
    samples = iter(stored)
    return [[item[UNIT] or (next(samples),) for item in sequence] for sequence in sequences]


def documents_of(sequences: Sequence[Sequence[StreamUnit]]) -> Documents:
    """Return the documents of sequences of stream units."""
    flat = list(chain.from_iterable(sequences))
    if not flat or any([item[UNIT] for item in flat]):
        return Documents.of(units_of(sequences))
    each, n, own = [*map(len, sequences)], len(flat), [item[SAMPLE_SOURCE] for item in flat]
    return Documents(each, each, [1] * n, [*map(length_of, flat)], *_contents(flat), own, [0] * n, ())


def _contents(items: Sequence[StreamUnit]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all stream units, one after the other, and their weights, [n] int32 and [n] float32."""
    content = bytearray().join([item[TOKENS][item[START] : item[END]] for item in items])
    tokens, weights = unmarked(np.frombuffer(content, np.int32))
    if any([item[WEIGHTS] is not None for item in items]):
        end = 0
        for item in items:
            start, end = end, end + item[LENGTH]
            if item[WEIGHTS] is not None:
                weights[start:end] = item[WEIGHTS][item[START] : item[END]]
    return tokens, weights


def place_of(item: StreamUnit) -> tuple[int, ...]:
    """Return the place of a stream unit: epoch, file, block, row, index in the row, empty rows before it, checksum.

    When the stream unit is read again, the checksum of its tokens shows whether it is the same one.
    """
    tokens = [_contents([item])[0]] if item[UNIT] is None else [sample.tokens for sample in item[UNIT]]
    crc = 0
    for ids in tokens:
        crc = zlib.crc32(np.ascontiguousarray(ids).data, crc)
    return item[EPOCH], *item[FILE_BLOCK], item[ROW], item[INDEX], item[EMPTY_BEFORE], crc - (1 << 31)
