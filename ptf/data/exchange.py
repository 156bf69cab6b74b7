"""Rows that change ranks, so that the ranks of a group have nearly equal work of attention in a step though each made its own rows.

The one idea: only the work of every row is told to all; who gets which row is then the same computation everywhere, and a row travels, as bytes, only
where that says so. Groups are small, so what a rank does in a step does not grow with the number of ranks.
"""

import pickle
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ptf.data.packing import balanced
from ptf.data.sample import Atom, dump_atoms, load_atoms

GROUP = 16  # ranks at most
GOES_ON, STOPS, FAILED = 0, 1, 2


class Peers(Protocol):
    """The ranks of a group, from one of them. All of them call the same methods in the same order, from one thread each."""

    @property
    def rank(self) -> int:
        """Among them."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, value: bytes) -> list[bytes]:
        """Everyone's, in the order of the ranks."""
        ...

    def scatter(self, values: Sequence[bytes]) -> list[bytes]:
        """Value i goes to rank i; what each sent here, in the order of the ranks."""
        ...


class PeerEnded(Exception):
    """Another rank of the group will make no more rows; `failed`: because of an error, which it reports itself."""

    def __init__(self, failed: bool) -> None:
        super().__init__("the loader of another worker " + ("failed: its own error says why" if failed else "was closed"))


def group_size(ranks: int) -> int:
    """The largest divisor of `ranks` that is at most `GROUP`."""
    return next(n for n in range(min(GROUP, ranks), 0, -1) if ranks % n == 0)


def work_of(row: Sequence[Atom]) -> int:
    """Of attention."""
    return sum(len(sample) * (len(sample) + 2 * sample.begins) for atom in row for sample in atom)


def leave(peers: Peers, failed: bool = False) -> None:
    """Say that this rank will make no more rows, in place of an `exchanged`."""
    peers.gather(np.array([FAILED if failed else STOPS], np.int64).tobytes())


def exchanged(rows: Sequence[list[Atom]], numbers: Sequence[int], peers: Peers) -> tuple[list[list[Atom]], list[int]]:
    """This rank's share of the rows that the group made, and their numbers in the step, ascending; equally many on every rank. Raises PeerEnded."""
    told = np.array([GOES_ON, *numbers, *map(work_of, rows)], np.int64)
    heard = [np.frombuffer(one, np.int64) for one in peers.gather(told.tobytes())]
    if ended := [int(one[0]) for one in heard if one[0] != GOES_ON]:
        raise PeerEnded(FAILED in ended)
    each = len(rows)
    owners = sorted((int(number), rank, int(work)) for rank, one in enumerate(heard) for number, work in zip(one[1 : 1 + each], one[1 + each :], strict=True))
    shares = balanced([work for *_, work in owners], peers.size)
    own = dict(zip(numbers, rows, strict=True))
    sent = [[owners[i][0] for i in share if owners[i][1] == peers.rank] for share in shares]
    parts = [b"" if to == peers.rank else as_bytes([own[number] for number in given]) for to, given in enumerate(sent)]
    arrived = peers.scatter(parts)
    mine = {number: own[number] for number in sent[peers.rank]}
    for rank, part in enumerate(arrived):
        if rank != peers.rank:
            there = [owners[i][0] for i in shares[peers.rank] if owners[i][1] == rank]
            mine |= zip(there, of_bytes(part), strict=True)
    return [mine[number] for number in sorted(mine)], sorted(mine)


def as_bytes(rows: Sequence[Sequence[Atom]]) -> bytes:
    """Of rows; nothing for none."""
    return pickle.dumps(([len(row) for row in rows], dump_atoms([atom for row in rows for atom in row])), 5) if rows else b""


def of_bytes(data: bytes) -> list[list[Atom]]:
    if not data:
        return []
    counts, state = pickle.loads(data)
    atoms = iter(load_atoms(state))
    return [[next(atoms) for _ in range(n)] for n in counts]
