"""The packer: pack units in, packed sequences of at most `seq_len` tokens out. Nothing is cut, and the samples of a
unit stay together.

The lengths in the look-ahead window are the bits of one integer. Finding the longest unit that fits is
then a mask and a `bit_length`, and "do two of them fill the sequence exactly?" is one AND of that integer with its
mirror image. The oldest unit always starts the next sequence, so none waits longer than `lookahead` sequences. The last
eighth of a sequence is filled by two or three units at once (`_first_of_last`), because what is left stays empty.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from ptf.data.document import Document, PackUnit, length
from ptf.errors import UserError


class Packer(Iterator[list[PackUnit]]):
    """Packed sequences of units. Over a finite iterator it ends when every unit is in a sequence."""

    def __init__(
        self,
        units: Iterator[PackUnit],
        seq_len: int,
        lookahead: int = 64,
        pending: Sequence[PackUnit] = (),
    ):
        """Make a packer of `units`, of which those that are `pending` come first."""
        self._units, self._seq_len, self._lookahead = units, seq_len, lookahead
        # the look-ahead window: number of arrival → unit, oldest first. It is all of a packer's state
        self.pending: dict[int, PackUnit] = {}
        self._arrivals = 0
        self._ages: dict[int, list[int]] = {}  # length → numbers of arrival of the units of that length, oldest first
        self._bits = 0  # bit n: the window has a unit of n tokens
        self._mirror = 0  # bit seq_len - n: the same, mirrored
        self._admit(iter(pending), len(pending))

    def _admit(self, units: Iterator[PackUnit], most: int) -> None:
        """Fill the window up to `most` units. Raise UserError for one that is longer than a sequence."""
        while len(self.pending) < most:
            unit = next(units, None)
            if unit is None:
                return
            n = length(unit)
            if n > self._seq_len:
                raise UserError(f"a sample of {n} tokens does not fit a sequence of seq_len {self._seq_len}")
            self.pending[self._arrivals] = unit
            self._ages.setdefault(n, []).append(self._arrivals)
            self._bits |= 1 << n
            self._mirror |= 1 << (self._seq_len - n)
            self._arrivals += 1

    def __next__(self) -> list[PackUnit]:
        self._admit(self._units, self._lookahead)
        if not self.pending:
            raise StopIteration
        sequence, room = list[PackUnit](), self._seq_len
        n: int | None = length(next(iter(self.pending.values())))
        while n is not None:
            of_this_length = self._ages[n]
            sequence.append(self.pending.pop(of_this_length.pop(0)))
            if not of_this_length:
                del self._ages[n]
                self._bits ^= 1 << n
                self._mirror ^= 1 << (self._seq_len - n)
            room -= n
            self._admit(self._units, self._lookahead)
            n = self._fitting(room)
        return sequence

    def _fitting(self, room: int) -> int | None:
        """Return the length of the unit that is taken next into so much room; None where none fits."""
        if room in self._ages:
            return room
        fits, mirror = self._bits & ((1 << room) - 1), self._mirror >> (self._seq_len - room)
        if not fits:
            return None
        pairs = fits & mirror  # lengths n for which room - n is there, too
        half = room >> 1
        if pairs >> half & 1 and room == 2 * half and len(self._ages[half]) < 2:
            pairs ^= 1 << half
        n = (pairs or fits).bit_length() - 1
        # the longest would leave less than two of the shortest need
        if not pairs and room <= self._seq_len >> 3 and room - n < 2 * ((self._bits & -self._bits).bit_length() - 1):
            return _first_of_last(fits, mirror, room, self._ages)
        return n


def _first_of_last(fits: int, mirror: int, room: int, ages: Mapping[int, Sequence[int]]) -> int:
    """Return the length that is taken first of the two or three units that fill `room` best: exactly, if three can.

    `fits` has the lengths below `room` as bits, `mirror` those lengths' complements to it. No one or two of them fill
    it exactly.
    """
    most = first = 0
    rest = fits
    while rest:
        n = rest.bit_length() - 1
        rest ^= 1 << n
        left = room - n
        others = fits & ((1 << (left + 1)) - 1)
        if len(ages[n]) < 2:
            others &= ~(1 << n)
        pairs = others & (mirror >> n)  # lengths m for which left - m is there, too
        while pairs:
            m = pairs.bit_length() - 1
            pairs ^= 1 << m
            three = (n, m, left - m)
            if all(three.count(k) <= len(ages[k]) for k in three):
                return n
        total = n + max(0, others.bit_length() - 1)
        if total > most:
            most, first = total, n
    return first


def idle(sequences: Sequence[Sequence[PackUnit]]) -> PackUnit:
    """Return a unit of one token that trains nothing, with the columns that the other samples have."""
    like = sequences[0][0][0].token_columns if sequences and sequences[0] else {}
    token_columns = {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in like.items()}
    return (Document(np.zeros(1, np.int32), np.zeros(1, np.float32), token_columns=token_columns),)


def balanced(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute items of given work to ranks, equally many to each, so that the ranks' sums are nearly equal.

    The first ranks may get one item more. The items are assigned from the heaviest to the lightest, each to the rank
    that has the least work and still has room (Graham's rule); then pairs are swapped between the most and the least
    loaded rank for as long as that brings their sums nearer. Return the indices of each rank's items, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    room = [len(work) // ranks + (rank < len(work) % ranks) for rank in range(ranks)]
    with_room = [(0.0, rank) for rank in range(ranks) if room[rank]]  # a heap of (sum, rank)
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        _, rank = heappop(with_room)
        shares[rank].append(i)
        sums[rank] += work[i]
        if len(shares[rank]) < room[rank]:
            heappush(with_room, (sums[rank], rank))
    # heaps of all ranks; an entry whose sum is no longer that of its rank is dropped when it comes first
    most_loaded = [(-total, rank) for rank, total in enumerate(sums)]
    least_loaded = [(total, rank) for rank, total in enumerate(sums)]
    heapify(most_loaded)
    heapify(least_loaded)
    for _ in range(len(work)):
        while -most_loaded[0][0] != sums[most_loaded[0][1]]:
            heappop(most_loaded)
        while least_loaded[0][0] != sums[least_loaded[0][1]]:
            heappop(least_loaded)
        most, least = most_loaded[0][1], least_loaded[0][1]
        swap = _best_swap(work, shares[most], shares[least], sums[most] - sums[least])
        if swap is None:
            break
        a, b = swap
        shares[most][shares[most].index(a)], shares[least][shares[least].index(b)] = b, a
        sums[most] += work[b] - work[a]
        sums[least] += work[a] - work[b]
        for rank in (most, least):
            heappush(most_loaded, (-sums[rank], rank))
            heappush(least_loaded, (sums[rank], rank))
    return [sorted(share) for share in shares]


def _best_swap(work: Sequence[float], most: Sequence[int], least: Sequence[int], gap: float) -> tuple[int, int] | None:
    """Return the items of two shares whose swap brings the shares' sums, which are `gap` apart, nearest to each other;
    None if no swap brings them nearer. Of swaps that do equally, the one with the smallest indices."""
    smallest = {work[b]: b for b in sorted(least, reverse=True)}  # work → the smallest index that has it
    works, swaps = sorted(smallest), list[tuple[float, int, int]]()
    for a in most:
        at = bisect_left(works, work[a] - gap / 2)  # a swap with an item of so much work would make the sums equal
        swaps += [
            (abs(gap - 2 * (work[a] - near)), a, smallest[near])
            for near in works[max(0, at - 1) : at + 1]
            if 0 < work[a] - near < gap
        ]
    return min(swaps)[1:] if swaps else None


def pack_sample(units: Sequence[PackUnit], seq_len: int, lookahead: int) -> list[list[PackUnit]]:
    """Pack units in a random order, and return the sequences as they are in an endless stream: without the last ones,
    for which the window runs empty."""
    packed = pack_all((units[i] for i in np.random.default_rng(0).permutation(len(units))), seq_len, lookahead)
    return packed[: max(1, len(packed) - lookahead // 4)]


def pack_all(units: Iterable[PackUnit], seq_len: int, lookahead: int = 1024) -> list[list[PackUnit]]:
    """Pack a finite number of units into sequences, by the same packer."""
    return list(Packer(iter(units), seq_len, lookahead))
