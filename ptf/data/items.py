"""What the streams of a lane pass on: an atom on its way, or where its tokens lie, and where it was read.

The one idea: an item is a plain tuple, and the item of a tokenized row holds arrays, numbers and strings only. Such tuples are made many at a time, and
the garbage collector forgets them; thousands of objects of a class in the windows would each time be searched for circles, with everything else in the
process.
"""

import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from ptf.data.documents import Documents
from ptf.data.sample import Atom, length, samples_of
from ptf.data.token_file import NO_STREAMS, TokenRows, weights_of

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
TOKENS, START, END = 9, 10, 11  # of the whole block, and where those of the sample lie
RUNS, FIRST_RUN, END_RUN = 12, 13, 14  # of the weights
OF = 15  # the sample's own source

epoch_of, length_of, rows_in = itemgetter(EPOCH), itemgetter(LENGTH), itemgetter(ROWS)


def items_of(atoms: Sequence[Atom], source: str, epoch: int, at: tuple[int, int], row: int, before: int) -> list[Item]:
    """Of the atoms of one row."""
    n = len(atoms)
    return [(atom, length(atom), source, epoch, at, row, i, 0 if i else before, (0 if i else before) + 1 / n) for i, atom in enumerate(atoms)]


def stored_items(block: TokenRows, first: int, end: int, source: str, epoch: int, at: tuple[int, int]) -> list[Item]:
    """Of rows of a block of which each has one atom of one sample without streams."""
    cuts, runs, own = block.spans(first, end)
    lengths = block.told[first:end, 1].tolist()
    fields: list[Iterable[Any]] = [repeat(None), lengths, repeat(source), repeat(epoch), repeat(at), range(first, end), repeat(0), repeat(0), repeat(1.0)]
    fields += [repeat(block.tokens), cuts, cuts[1:], repeat(block.runs), runs, runs[1:], own]
    return list(zip(*fields))  # noqa: B905  repeat has no end


def behind(item: Item, before: int) -> Item:
    """A row's first item, before which so many rows left none."""
    return (*item[:BEFORE], before, before + item[ROWS], *item[TOKENS:])


def atoms_of(rows: Sequence[Sequence[Item]]) -> list[list[Atom]]:
    """The atoms of rows of items."""
    flat = [item for row in rows for item in row if item[ATOM] is None]
    if not flat:
        return [[item[ATOM] for item in row] for row in rows]
    weights, cuts = _weights(flat), [0, *accumulate(map(length_of, flat))]
    made = samples_of(_tokens(flat), [weights[start:end] for start, end in pairwise(cuts)], [item[OF] for item in flat], [NO_STREAMS] * len(flat))
    if len(flat) == sum(map(len, rows)):
        atoms = zip(made)
        return [[next(atoms) for _ in row] for row in rows]
    samples = iter(made)
    return [[item[ATOM] or (next(samples),) for item in row] for row in rows]


def documents_of(rows: Sequence[Sequence[Item]]) -> Documents:
    """The documents of rows of items."""
    flat = list(chain.from_iterable(rows))
    if not flat or any([item[ATOM] for item in flat]):
        return Documents.of(atoms_of(rows))
    each, n = [*map(len, rows)], len(flat)
    return Documents(each, each, [1] * n, _tokens(flat), _weights(flat), [item[OF] for item in flat], [0] * n, ())


def _tokens(items: Sequence[Item]) -> list[np.ndarray]:
    return [item[TOKENS][item[START] : item[END]] for item in items]


def _weights(items: Sequence[Item]) -> np.ndarray:
    """Of all of them, one after the other."""
    return weights_of(np.concatenate([item[RUNS][item[FIRST_RUN] : item[END_RUN]] for item in items]))


def place_of(item: Item) -> tuple[int, ...]:
    """Epoch, file, block, row; which of the row's atoms; rows without any that came before it; and the mark by which it is known when it is read again."""
    tokens = _tokens([item]) if item[ATOM] is None else [sample.tokens for sample in item[ATOM]]
    crc = 0
    for ids in tokens:
        crc = zlib.crc32(np.ascontiguousarray(ids).data, crc)
    return item[EPOCH], *item[AT], item[ROW], item[INDEX], item[BEFORE], crc - (1 << 31)
