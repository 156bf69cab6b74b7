"""Exchange of packed sequences among ranks, so that the ranks of a group have nearly equal attention work in a step
although each rank made its own sequences.

Only the amount of work of each sequence is sent to all; the sequence itself is sent, as bytes, only if another rank
trains it. A
message has a fixed cost (0.3 to 0.7 ms of CPU with 8 to 16 processes), about that of making a step. So groups have at
most 16 ranks, one message covers up to 16 steps, and the ranks divide among themselves the steps whose sequences they
assign: the cost per rank is almost independent of the number of ranks.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ptf.data.document import PackUnit
from ptf.data.packing import balanced

GROUP = 16  # ranks at most
STEPS = 16  # at most so many steps' sequences are exchanged together
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
    steps: Sequence[Sequence[list[PackUnit]]], numbers: Sequence[int], peers: Peers, ended: int = GOES_ON
) -> tuple[list[tuple[list[list[PackUnit]], list[int]]], PeerEnded | None]:
    """Exchange the sequences of the steps that all ranks of the group made, at most `STEPS`.

    `numbers` are the numbers of the sequences that this rank makes in a step. For each step, return this rank's share
    of the sequences and their numbers in the step, ascending, equally many on every rank. Also return an error if some
    rank will make no more sequences; this rank announces that with `ended`.
    """
    each, size, me = len(numbers), peers.size, peers.rank
    message = np.zeros(2 + each + STEPS * each, np.int64)
    message[:2], message[2 : 2 + each] = (ended, len(steps)), numbers
    works = [work_of(sequence) for sequences in steps for sequence in sequences]
    message[2 + each :][: len(works)] = works
    messages = np.frombuffer(b"".join(peers.all_gather(message.tobytes())), np.int64).reshape(size, -1)
    end = PeerEnded(FAILED in messages[:, 0]) if messages[:, 0].any() else None
    common = int(messages[:, 1].min())
    if not common:
        return [], end
    # for all sequences of a step, by their numbers: the rank that makes each, and its index among that rank's
    order = np.argsort(messages[:, 2 : 2 + each].ravel())
    made_by, which, in_step = (
        (order // each).tolist(),
        (order % each).tolist(),
        np.sort(messages[:, 2 : 2 + each].ravel()).tolist(),
    )
    work = messages[:, 2 + each :].reshape(size, STEPS, each).transpose(1, 0, 2).reshape(STEPS, -1)[:common, order]
    destinations = _assign_sequences(work, made_by, peers)
    out: list[list[list[PackUnit]]] = [[] for _ in range(size)]
    for sequences, ranks in zip(steps, destinations, strict=False):
        for owner, i, rank in zip(made_by, which, ranks, strict=True):
            if owner == me != rank:
                out[rank].append(sequences[i])
    sent = [pickle.dumps(sequences, 5) for sequences in out]
    arrived = [iter(pickle.loads(part)) for part in peers.all_to_all(sent)]
    shares = []
    for sequences, ranks in zip(steps, destinations, strict=False):
        mine = [at for at, rank in enumerate(ranks) if rank == me]
        shares.append(
            (
                [sequences[which[at]] if made_by[at] == me else next(arrived[made_by[at]]) for at in mine],
                [in_step[at] for at in mine],
            )
        )
    return shares, end


def _assign_sequences(work: np.ndarray, made_by: Sequence[int], peers: Peers) -> list[list[int]]:
    """Return the rank that trains each sequence of each step; each rank computes this for some of the steps.

    `work` [steps, sequences] and the makers of the sequences are the same on all ranks.
    """
    message = np.zeros((-(-len(work) // peers.size), work.shape[1]), np.uint8)
    for mine, sequence in zip(message, work[peers.rank :: peers.size].tolist(), strict=False):
        shares = balanced(sequence, peers.size)
        for share, rank in zip(shares, _assign_shares(shares, made_by), strict=True):
            mine[share] = rank
    messages = np.frombuffer(b"".join(peers.all_gather(message.tobytes())), np.uint8).reshape(
        peers.size, *message.shape
    )
    return messages.transpose(1, 0, 2).reshape(-1, work.shape[1])[: len(work)].tolist()


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
