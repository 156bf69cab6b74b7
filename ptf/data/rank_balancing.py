"""Exchange of packed sequences among ranks, so that the ranks of a group have nearly equal attention work in a step
although each rank made its own sequences.

Only the amount of work of each sequence is sent to all; the sequence itself is sent, as bytes, only if another rank
trains it. A message has a fixed cost (0.3 to 0.7 ms of CPU with 8 to 16 processes), and a step takes three, beside
the GPU's work. Groups have at most 16 ranks, so that the cost per rank does not grow with their number.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ptf.data.document import PackUnit
from ptf.data.packing import balanced

GROUP = 16  # ranks at most
GOES_ON, STOPS, FAILED = 0, 1, 2


class Peers(Protocol):
    """The ranks of a group, as one of them reaches them.

    All of them call the same methods in the same order, from one thread each.
    """

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def all_gather(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in the order of the ranks; all have the same length."""
        ...

    def all_to_all(self, values: Sequence[bytes]) -> list[bytes]:
        """Send value i to rank i; return what each rank sent here, in the order of the ranks."""
        ...


class PeerEnded(Exception):
    """Another rank of the group will make no more sequences.

    `failed` says that the reason is an error, which that rank reports itself.
    """

    def __init__(self, failed: bool) -> None:
        super().__init__(
            "the loader of another worker " + ("failed: its own error says why" if failed else "was closed")
        )


def group_size(ranks: int) -> int:
    """Return the largest divisor of `ranks` that is at most `GROUP`."""
    return next(n for n in range(min(GROUP, ranks), 0, -1) if ranks % n == 0)


def work_of(sequence: Sequence[PackUnit]) -> int:
    """Return the work of attention over a packed sequence, in (query, key) pairs up to a factor."""
    return sum((n := len(sample.tokens)) * (n + 2 * sample.prefix_length) for unit in sequence for sample in unit)


def exchange_sequences(
    sequences: Sequence[list[PackUnit]], numbers: Sequence[int], peers: Peers, ended: int = GOES_ON
) -> tuple[list[list[PackUnit]], list[int]]:
    """Exchange the sequences of one step that all ranks of the group made.

    `numbers` are the numbers of the sequences that this rank makes in a step. Return this rank's share of the
    sequences and their numbers in the step, ascending, equally many on every rank. Raises PeerEnded on all ranks if
    some rank makes no more sequences; this rank announces that with `ended`.
    """
    each, me = len(numbers), peers.rank
    message = np.array([ended, *numbers, *(map(work_of, sequences) if sequences else [0] * each)], np.int64)
    messages = np.frombuffer(b"".join(peers.all_gather(message.tobytes())), np.int64).reshape(peers.size, -1)
    if messages[:, 0].any():
        raise PeerEnded(FAILED in messages[:, 0])
    # for all sequences of the step, by their numbers: the rank that makes each, and its index among that rank's
    in_step, work = messages[:, 1 : 1 + each].ravel(), messages[:, 1 + each :].ravel()
    order = np.argsort(in_step)
    made_by, which = (order // each).tolist(), (order % each).tolist()
    shares = balanced(work[order].tolist(), peers.size)
    ranks = np.zeros(len(order), np.int64)  # the rank that trains each sequence; all ranks compute the same
    for share, rank in zip(shares, _assign_shares(shares, made_by), strict=True):
        ranks[share] = rank
    out: list[list[list[PackUnit]]] = [[] for _ in range(peers.size)]
    for owner, i, rank in zip(made_by, which, ranks.tolist(), strict=True):
        if owner == me != rank:
            out[rank].append(sequences[i])
    arrived = [iter(pickle.loads(part)) for part in peers.all_to_all([pickle.dumps(sent, 5) for sent in out])]
    mine = np.flatnonzero(ranks == me).tolist()
    own = [sequences[which[at]] if made_by[at] == me else next(arrived[made_by[at]]) for at in mine]
    return own, in_step[order[mine]].tolist()


def _assign_shares(shares: Sequence[Sequence[int]], made_by: Sequence[int]) -> list[int]:
    """Return the rank that gets each share, so that many sequences stay where they were made.

    The largest overlaps are assigned first.
    """
    overlaps = Counter((k, made_by[i]) for k, share in enumerate(shares) for i in share)
    assigned: dict[int, int] = {}
    free = dict.fromkeys(range(len(shares)))
    for (k, rank), _ in overlaps.most_common():
        if k not in assigned and rank in free:
            assigned[k] = rank
            del free[rank]
    return [assigned[k] if k in assigned else free.popitem()[0] for k in range(len(shares))]
