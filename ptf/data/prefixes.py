"""Shared prefixes: packed sequences in which a prefix of several samples, such as the prompt of several responses, is
computed once.

The first sample of a group (samples with a shared prefix) is laid out whole. The others follow it directly without the
prefix; their `prefix_length` is its length. The last common token is not part of the prefix: each sample has it,
because its target differs. A prefix is never trained and has zeros in its columns, so except for rounding all gradients
are the same as if each sample were alone in a sequence.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ptf.data.document import Document, PackUnit, length
from ptf.errors import UserError


def untrained_prefix(sample: Document) -> bytes:
    """Return the tokens before the first one with a weight or a non-zero column, as bytes; b"" if fewer than two."""
    used = sample.loss_weights != 0
    for values in sample.token_columns.values():
        used = used | (values != 0).reshape(len(values), -1).any(1)
    first = np.flatnonzero(used)
    return sample.tokens[: first[0]].tobytes() if len(first) and first[0] > 1 else b""


def without_prefix(sample: Document, n: int) -> Document:
    """Return the sample without its first n tokens."""
    return replace(sample.take(slice(n, None)), prefix_length=n)


def prefix_groups(samples: Sequence[Document], seq_len: int) -> list[PackUnit]:
    """Group the samples of one row into units of at most `seq_len` tokens that share prefixes.

    The longest sample of a group is whole, and the others follow it without the prefix. So a conversation whose every
    turn is a separate sample, because the template renders earlier turns differently, costs little more than its
    length.
    """
    left = sorted(samples, key=len, reverse=True)
    units: list[PackUnit] = []
    while left:
        head, *others = left
        unit, room, left = [head], seq_len - len(head), []
        for sample in others:
            n = min(
                _common_prefix(head.tokens, sample.tokens), len(untrained_prefix(sample)) // sample.tokens.itemsize - 1
            )
            if n > 0 and len(sample) - n <= room:
                unit.append(without_prefix(sample, n))
                room -= len(sample) - n
            else:
                left.append(sample)
        units.append(tuple(unit))
    return units


def separate(unit: PackUnit) -> list[Document]:
    """Return the samples of a group, each with its prefix, which has no weight and zeros in the columns."""
    head = unit[0]
    return [head, *(replace(s.after(head.tokens[: s.prefix_length]), prefix_length=0) for s in unit[1:])]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def pack_shared(units: Sequence[PackUnit], seq_len: int) -> list[list[PackUnit]]:
    """Pack units like `pack_all`, but let units of one sample in the same sequence share their prefixes.

    The largest groups are placed first, the longest members of each first (first-fit decreasing): each member goes
    into the first sequence with room that already has its group, otherwise into the first sequence with room.
    """
    groups: dict[bytes | int, list[PackUnit]] = {}
    for i, unit in enumerate(units):
        groups.setdefault((len(unit) == 1 and untrained_prefix(unit[0])) or i, []).append(unit)
    members = sorted(groups.items(), key=lambda group: -sum(map(length, group[1])))
    sequences: list[list[PackUnit]] = []
    room = np.zeros(max(1, len(units)), np.int64)
    for key, group in members:
        shared = len(key) // group[0][0].tokens.itemsize - 1 if isinstance(key, bytes) else 0
        homes: dict[int, list[PackUnit]] = {}  # sequence → units of this group in it
        for unit in sorted(group, key=length, reverse=True):
            n = length(unit)
            if n > seq_len:
                raise UserError(f"a sample of {n} tokens does not fit a sequence of seq_len {seq_len}")
            home = next((i for i in homes if room[i] >= n - shared), None) if shared else None
            if home is not None:
                homes[home].append((without_prefix(unit[0], shared),))
                room[home] -= n - shared
                continue
            home = int(np.argmax(room[: len(sequences)] >= n)) if sequences else 0
            if home == len(sequences) or room[home] < n:
                home = len(sequences)
                sequences.append([])
                room[home] = seq_len
            room[home] -= n
            homes[home] = [unit]  # a new entry: a sequence with this group would have had room for the unit's rest
        for home, together in homes.items():
            sequences[home] += together
    return sequences
