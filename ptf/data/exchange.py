"""Rows that change ranks, so that the ranks of a group have nearly equal work of attention in a step though each made its own rows.

The one idea: only the work of every row is told to all; a row travels, as bytes, only where it is trained elsewhere. Groups are small and messages are for
several steps together, of which each rank deals out some, so what a rank does in a step hardly grows with the number of ranks: a message costs as much
as making a step (0.3 to 0.7 ms of CPU among 8 to 16 processes), whatever is in it.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from ptf.data.packing import balanced
from ptf.data.sample import Atom, dump_atoms, load_atoms

GROUP = 16  # ranks at most
STEPS = 16  # at most, whose rows are exchanged together
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
        """Everyone's, in the order of the ranks; all are equally long."""
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
    return sum((n := len(sample.tokens)) * (n + 2 * sample.begins) for atom in row for sample in atom)


def exchanged(
    steps: Sequence[Sequence[list[Atom]]], numbers: Sequence[int], peers: Peers, ended: int = GOES_ON
) -> tuple[list[tuple[list[list[Atom]], list[int]]], PeerEnded | None]:
    """Of each of the `steps` (at most `STEPS`) that all ranks of the group made: this rank's share of the rows that they made, and the rows' numbers in
    the step, ascending; equally many on every rank. `numbers` are those of the rows that this rank makes in a step. And whether some rank will make no
    more, as this one says with `ended`."""
    each, size, me = len(numbers), peers.size, peers.rank
    told = np.zeros(2 + each + STEPS * each, np.int64)
    told[:2], told[2 : 2 + each] = (ended, len(steps)), numbers
    works = [work_of(row) for rows in steps for row in rows]
    told[2 + each :][: len(works)] = works
    heard = np.frombuffer(b"".join(peers.gather(told.tobytes())), np.int64).reshape(size, -1)
    end = PeerEnded(FAILED in heard[:, 0]) if heard[:, 0].any() else None
    common = int(heard[:, 1].min())
    if not common:
        return [], end
    order = np.argsort(heard[:, 2 : 2 + each].ravel())  # of all rows of a step, by their numbers: who makes them, and which of that rank's
    made_by, which, in_step = (order // each).tolist(), (order % each).tolist(), np.sort(heard[:, 2 : 2 + each].ravel()).tolist()
    work = heard[:, 2 + each :].reshape(size, STEPS, each).transpose(1, 0, 2).reshape(STEPS, -1)[:common, order]
    to = _dealt(work, made_by, peers)
    out: list[list[list[Atom]]] = [[] for _ in range(size)]
    for rows, goes in zip(steps, to, strict=False):
        for owner, i, rank in zip(made_by, which, goes, strict=True):
            if owner == me != rank:
                out[rank].append(rows[i])
    arrived = [iter(of_bytes(part)) for part in peers.scatter([as_bytes(rows) for rows in out])]
    found = []
    for rows, goes in zip(steps, to, strict=False):
        mine = [at for at, rank in enumerate(goes) if rank == me]
        found.append(([rows[which[at]] if made_by[at] == me else next(arrived[made_by[at]]) for at in mine], [in_step[at] for at in mine]))
    return found, end


def _dealt(work: np.ndarray, made_by: Sequence[int], peers: Peers) -> list[list[int]]:
    """Which rank trains each row of each step; each rank says it of every so many-th step. `work` [steps, rows] and who made the rows is known to all."""
    told = np.zeros((-(-len(work) // peers.size), work.shape[1]), np.uint8)
    for mine, row in zip(told, work[peers.rank :: peers.size].tolist(), strict=False):
        shares = balanced(row, peers.size)
        for share, rank in zip(shares, _at_home(shares, made_by), strict=True):
            mine[share] = rank
    heard = np.frombuffer(b"".join(peers.gather(told.tobytes())), np.uint8).reshape(peers.size, *told.shape)
    return heard.transpose(1, 0, 2).reshape(-1, work.shape[1])[: len(work)].tolist()


def _at_home(shares: Sequence[Sequence[int]], made_by: Sequence[int]) -> list[int]:
    """Which rank is given each share, so that many rows stay where they were made: the largest overlaps first."""
    overlaps = Counter((k, made_by[i]) for k, share in enumerate(shares) for i in share)
    found: dict[int, int] = {}
    free = dict.fromkeys(range(len(shares)))
    for (k, rank), _ in overlaps.most_common():
        if k not in found and rank in free:
            found[k] = rank
            del free[rank]
    return [found[k] if k in found else free.popitem()[0] for k in range(len(shares))]


def as_bytes(rows: Sequence[Sequence[Atom]]) -> bytes:
    """Of rows; nothing for none."""
    if not rows:
        return b""
    state = dump_atoms([atom for row in rows for atom in row])
    bits = state["weights"] == 1
    if np.array_equal(bits, state["weights"]):  # mostly, and then a token takes half the bytes
        state["weights"] = np.packbits(bits)
    return pickle.dumps(([len(row) for row in rows], state), 5)


def of_bytes(data: bytes) -> list[list[Atom]]:
    if not data:
        return []
    counts, state = pickle.loads(data)
    if state["weights"].dtype == np.uint8:
        state["weights"] = np.unpackbits(state["weights"], count=len(state["tokens"])).astype(np.float32)
    atoms = iter(load_atoms(state))
    return [list(islice(atoms, n)) for n in counts]
