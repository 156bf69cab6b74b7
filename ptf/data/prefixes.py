"""Rows in which what several samples begin with is read once: the answers to one prompt share the prompt.

The one idea: the first sample of a family is laid out whole, and right behind it each other that begins alike from where they part; its `begins` says
how far on that is. The last token of what is shared is each sample's own, for each has another target there. What is shared is never trained and has
nothing in its streams, so every gradient is the same, but for rounding, as if each sample were a row's only one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ptf.data.sample import Atom, Sample, length
from ptf.errors import UserError


def beginning(sample: Sample) -> bytes:
    """What comes before the first token that has a weight or anything in a stream; nothing where there is none, or not two before it."""
    said = sample.weights != 0
    for values in sample.streams.values():
        said = said | (values != 0).reshape(len(values), -1).any(1)
    first = np.flatnonzero(said)
    return sample.tokens[: first[0]].tobytes() if len(first) and first[0] > 1 else b""


def parted(sample: Sample, n: int) -> Sample:
    """It, from its token n on."""
    return replace(sample, tokens=sample.tokens[n:], weights=sample.weights[n:], streams={name: v[n:] for name, v in sample.streams.items()}, begins=n)


def families(samples: Sequence[Sample], seq_len: int) -> list[Atom]:
    """The samples of one row of data as atoms of at most `seq_len` tokens, in which what samples begin with alike is read once: a family's longest
    sample is whole, and behind it lies each other from where the two part. A conversation of which every turn had to become a sample of its own, for
    the template shows earlier turns otherwise than they were served, costs little more than once its length."""
    left = sorted(samples, key=len, reverse=True)
    atoms: list[Atom] = []
    while left:
        head, *others = left
        atom, room, left = [head], seq_len - len(head), []
        for sample in others:
            n = min(_alike(head.tokens, sample.tokens), len(beginning(sample)) // sample.tokens.itemsize - 1)
            if n > 0 and len(sample) - n <= room:
                atom.append(parted(sample, n))
                room -= len(sample) - n
            else:
                left.append(sample)
        atoms.append(tuple(atom))
    return atoms


def apart(atom: Atom) -> list[Sample]:
    """The samples of a family, each whole again."""
    head = atom[0]
    return [head, *(joined(head, sample) for sample in atom[1:])]


def joined(head: Sample, sample: Sample) -> Sample:
    """A sample that goes on from another's beginning, with that before it; what is shared has no weight and nothing in its streams."""
    n = sample.begins
    streams = {name: np.concatenate([np.zeros((n, *v.shape[1:]), v.dtype), v]) for name, v in sample.streams.items()}
    weights = np.concatenate([np.zeros(n, np.float32), sample.weights])
    return replace(sample, tokens=np.concatenate([head.tokens[:n], sample.tokens]), weights=weights, streams=streams, begins=0)


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two samples begin with alike."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def pack_shared(atoms: Sequence[Atom], seq_len: int) -> list[list[Atom]]:
    """As `pack_all`, of atoms of which those of one sample may share what they begin with; who does is side by side. The largest families go first,
    their longest members first, each into the first row that has room (first-fit decreasing), its family's rows before others."""
    families: dict[bytes | int, list[Atom]] = {}
    for i, atom in enumerate(atoms):
        families.setdefault((len(atom) == 1 and beginning(atom[0])) or i, []).append(atom)
    members = sorted(families.items(), key=lambda family: -sum(map(length, family[1])))
    rows: list[list[Atom]] = []
    room = np.zeros(max(1, len(atoms)), np.int64)
    for key, family in members:
        shared = len(key) // family[0][0].tokens.itemsize - 1 if isinstance(key, bytes) else 0
        homes: dict[int, list[Atom]] = {}  # row → this family's atoms there
        for atom in sorted(family, key=length, reverse=True):
            n = length(atom)
            if n > seq_len:
                raise UserError(f"a sample of {n} tokens does not fit a row of seq_len {seq_len}")
            home = next((row for row in homes if room[row] >= n - shared), None) if shared else None
            if home is not None:
                homes[home].append((parted(atom[0], shared),))
                room[home] -= n - shared
                continue
            home = int(np.argmax(room[: len(rows)] >= n)) if rows else 0
            if home == len(rows) or room[home] < n:
                home = len(rows)
                rows.append([])
                room[home] = seq_len
            room[home] -= n
            homes[home] = [atom]  # in a row that has its family, there was less room than that
        for row, together in homes.items():
            rows[row] += together
    return rows
