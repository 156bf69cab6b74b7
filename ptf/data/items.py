"""What the streams of a lane pass on: an atom on its way, or where its tokens lie, and where it was read.

The one idea: an item is a plain tuple, and the item of a tokenized row holds arrays, numbers and strings only. Such tuples are made many at a time, and
the garbage collector forgets them; thousands of objects of a class in the windows would each time be searched for circles, with everything else in the
process.
"""

import zlib
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np

from ptf.data.sample import Atom, length, samples_of
from ptf.data.token_file import NO_STREAMS, TokenRows

Item = tuple[Any, ...]

ATOM = 0  # None where its only sample lies in a block of tokenized rows, see below
LENGTH = 1  # tokens
SOURCE = 2
EPOCH = 3
AT = 4  # file and block
ROW = 5
INDEX = 6  # which of the row's atoms
BEFORE = 7  # rows without any that came before it
ROWS = 8  # that it stands for: those and its share of its own
TOKENS, WEIGHTS, START, END, OF = range(9, 14)  # arrays of the whole block, where the sample lies in them, and the sample's own source

epoch_of, length_of, rows_in = itemgetter(EPOCH), itemgetter(LENGTH), itemgetter(ROWS)


def items_of(atoms: Sequence[Atom], source: str, epoch: int, at: tuple[int, int], row: int, before: int) -> list[Item]:
    """Of the atoms of one row."""
    n = len(atoms)
    return [(atom, length(atom), source, epoch, at, row, i, 0 if i else before, (0 if i else before) + 1 / n) for i, atom in enumerate(atoms)]


def stored_items(block: TokenRows, first: int, end: int, source: str, epoch: int, at: tuple[int, int]) -> list[Item]:
    """Of rows of a block of which each has one atom of one sample without streams."""
    starts, ends, own = block.spans(first, end)
    lengths = block.told[first:end, 1].tolist()
    fields: list[Iterable[Any]] = [repeat(None), lengths, repeat(source), repeat(epoch), repeat(at), range(first, end), repeat(0), repeat(0), repeat(1.0)]
    return list(zip(*fields, repeat(block.tokens), repeat(block.weights), starts, ends, own))


def behind(item: Item, before: int) -> Item:
    """A row's only item, before which so many rows left none."""
    return (*item[:BEFORE], before, before + 1.0, *item[TOKENS:])


def atoms_of(rows: Sequence[Sequence[Item]]) -> list[list[Atom]]:
    """The atoms of rows of items."""
    flat = [item for row in rows for item in row if item[ATOM] is None]
    made = samples_of(
        [item[TOKENS][item[START] : item[END]] for item in flat],
        [item[WEIGHTS][item[START] : item[END]] for item in flat],
        [item[OF] for item in flat],
        [NO_STREAMS] * len(flat),
    )
    if not any(item[ATOM] for row in rows for item in row):
        atoms = zip(made)
        return [[next(atoms) for _ in row] for row in rows]
    samples = iter(made)
    return [[item[ATOM] or (next(samples),) for item in row] for row in rows]


def place_of(item: Item) -> tuple[int, ...]:
    """Epoch, file, block, row; which of the row's atoms; rows without any that came before it; and the mark by which it is known when it is read again."""
    tokens = [item[TOKENS][item[START] : item[END]]] if item[ATOM] is None else [sample.tokens for sample in item[ATOM]]
    crc = 0
    for ids in tokens:
        crc = zlib.crc32(np.ascontiguousarray(ids).data, crc)
    return item[EPOCH], *item[AT], item[ROW], item[INDEX], item[BEFORE], crc - (1 << 31)
