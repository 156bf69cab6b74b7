import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ptf.data.document import Document, PackUnit, length
from ptf.data.packing import Packer, _first_of_last, balanced, pack_all
from ptf.errors import UserError


def unit(lengths: list[int], number: int) -> PackUnit:
    return tuple(Document(np.full(n, number, np.int32), np.ones(n, np.float32), str(number)) for n in lengths)


class Numbered:
    """An endless stream of units with given lengths, each marked with its number."""

    def __init__(self, lengths: np.ndarray):
        self.lengths, self.at = lengths, 0

    def __next__(self) -> PackUnit:
        self.at += 1
        return unit([int(self.lengths[(self.at - 1) % len(self.lengths)])], self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def numbers(sequences: list[list[PackUnit]]) -> list[list[int]]:
    return [[int(a[0].source) for a in sequence] for sequence in sequences]


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), max_size=60), st.integers(36, 50), st.integers(1, 40)
)
def test_nothing_is_lost_repeated_or_split(lengths: list[list[int]], seq_len: int, lookahead: int) -> None:
    units = [unit(sizes, i) for i, sizes in enumerate(lengths)]
    sequences = pack_all(units, seq_len, lookahead)
    packed = [a for sequence in sequences for a in sequence]
    assert sorted(int(a[0].source) for a in packed) == list(range(len(units)))
    assert all(a is units[int(a[0].source)] for a in packed)  # the very unit: no part of it is elsewhere
    assert all(0 < sum(map(length, sequence)) <= seq_len for sequence in sequences)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=50), st.integers(1, 32))
def test_no_unit_waits_longer_than_the_lookahead(lengths: list[int], lookahead: int) -> None:
    packer = Packer(Numbered(np.array(lengths)), 64, lookahead)
    for r in range(80):
        for a in next(packer):
            entered = int(a[0].source)  # sequences begun before it came in number at most its own number
            assert r <= entered + lookahead
    sequences = numbers([next(packer) for _ in range(40)])
    assert all(sequence[0] == min(sequence) for sequence in sequences)  # the oldest leads


def test_two_units_of_one_length_are_needed_for_a_pair() -> None:
    units = [unit([n], i) for i, n in enumerate([6, 2, 3])]  # after 6 of 10 there is room for 2 + 2, but only one 2
    assert numbers(pack_all(units, 10)) == [[0, 2], [1]]
    units = [unit([n], i) for i, n in enumerate([6, 2, 3, 2])]
    assert numbers(pack_all(units, 10)) == [[0, 1, 3], [2]]


@given(st.lists(st.integers(3, 30), min_size=1, max_size=8), st.integers(31, 60))
def test_the_last_units_fill_the_room_best(lengths: list[int], room: int) -> None:
    """The unit that is taken begins three that fill the room, or else the one or two that fill most of it."""
    assume(not any(sum(some) == room for some in itertools.combinations(lengths, 2)))
    ages = {n: [0] * lengths.count(n) for n in lengths}
    fits, mirror = sum(1 << n for n in ages), sum(1 << (room - n) for n in ages)
    best = {n: n for n in ages}  # by the first unit: how much one or two fill at most
    for n, m in itertools.permutations(lengths, 2):
        best[n] = max(best[n], n + m if n + m <= room else 0)
    found = _first_of_last(fits, mirror, room, ages)
    exact = [n for three in itertools.combinations(lengths, 3) if sum(three) == room for n in three]
    assert found in (exact or [n for n in ages if best[n] == max(best.values())])


def log_normal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Median 180, mean 298 before the cut at 2,048."""
    return np.clip(rng.lognormal(np.log(180), 1.004, n), 1, 2048).astype(int)


def bimodal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.clip(np.where(rng.random(n) < 0.7, rng.normal(150, 40, n), rng.normal(1500, 300, n)), 1, 4096).astype(int)


def heavy_tail(rng: np.random.Generator, n: int) -> np.ndarray:
    """Pareto, from 60 tokens on: whatever is left of a sequence below 60 stays empty."""
    return np.clip(60 * (1 + rng.pareto(1.1, n)), 60, 4096).astype(int)


@pytest.mark.parametrize(("lengths", "least"), [(log_normal, 0.998), (bimodal, 0.998), (heavy_tail, 0.997)])
def test_fill(lengths: Any, least: float) -> None:
    sequences = list(itertools.islice(Packer(Numbered(lengths(np.random.default_rng(0), 20000)), 4096, 64), 1000))
    fill = sum(length(a) for sequence in sequences for a in sequence) / (len(sequences) * 4096)
    assert fill >= least
    greedy = sum(
        length(a)
        for sequence in first_fit(iter(Numbered(lengths(np.random.default_rng(0), 20000)).__next__, None))
        for a in sequence
    )
    assert greedy / (1000 * 4096) < 0.97  # the bar tells packers apart


def first_fit(units: Iterator[PackUnit]) -> Iterator[list[PackUnit]]:
    """1,000 sequences, each closed by the first unit that does not fit."""
    sequence: list[PackUnit] = []
    for _ in range(1000):
        while True:
            a = next(units)
            if sum(map(length, sequence)) + length(a) > 4096:
                break
            sequence.append(a)
        yield sequence
        sequence = [a]


def test_a_unit_longer_than_a_sequence_is_refused() -> None:
    with pytest.raises(UserError, match="65 tokens does not fit a sequence of seq_len 64"):
        pack_all([unit([40, 25], 0)], 64)


@given(st.lists(st.floats(1, 1e6), max_size=40), st.integers(1, 9))
def test_dealing_keeps_all_in_equal_numbers(work: list[float], ranks: int) -> None:
    shares = balanced(work, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(work)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    sums = [sum(work[i] for i in share) for share in shares]
    dealt = [sum(work[rank::ranks]) for rank in range(ranks)]
    assert max(sums) <= max(dealt) * (1 + 1e-9) or max(sums) <= max(work) + sum(work) / ranks


def test_eight_ranks_of_eight_sequences_differ_by_less_than_two_percent() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(180), 1.03, 20_000), 8, 4096).astype(int)
    sequences = pack_all([unit([int(n)], 0) for n in lengths], 4096, 64)
    work = [float(sum(length(one) ** 2 for one in sequence)) for sequence in sequences]
    over = []
    for at in range(0, len(work) - 63, 64):
        sums = [sum(work[at + i] for i in share) for share in balanced(work[at : at + 64], 8)]
        over.append(max(sums) / np.mean(sums) - 1)
    assert np.median(over) < 0.02


def counted(name: str) -> Any:
    """A method of Counted."""

    def method(self: float, other: float) -> Any:
        Counted.operations += 1
        found = getattr(float, name)(self, other)
        return Counted(found) if type(found) is float else found

    return method


class Counted(float):
    """A number that counts what is done with it and with what is computed from it."""

    operations = 0
    __add__, __radd__, __sub__, __rsub__ = map(counted, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __lt__, __gt__, __le__, __ge__, __eq__ = map(counted, ("__lt__", "__gt__", "__le__", "__ge__", "__eq__"))
    __hash__ = float.__hash__


def operations_of(ranks: int, sequences: int) -> int:
    """Of dealing the sequences of three steps."""
    rng, Counted.operations = np.random.default_rng(0), 0
    for _ in range(3):
        balanced([Counted(int(n)) for n in rng.lognormal(10, 1, sequences)], ranks)
    return Counted.operations


@pytest.mark.parametrize("few", [(2, 64), (8, 256)])
@pytest.mark.parametrize("more", ["sequences", "ranks"])
def test_dealing_does_hardly_more_for_a_sequence_where_there_are_more(few: tuple[int, int], more: str) -> None:
    ranks, sequences = few
    many = operations_of(ranks * (32 if more == "ranks" else 1), sequences * 32)
    assert 0 < many < 32**1.15 * operations_of(ranks, sequences)


def dealt_by_all_pairs(work: list[int], ranks: int) -> list[list[int]]:
    """What `balanced` is defined as, by looking at all ranks and all pairs."""
    shares, sums = [list[int]() for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        room = (r for r in range(ranks) if len(shares[r]) < len(work) // ranks + (r < len(work) % ranks))
        rank = min(room, key=lambda r: (sums[r], r))
        shares[rank].append(i)
        sums[rank] += work[i]
    for _ in work:
        most, least = max(range(ranks), key=lambda r: (sums[r], -r)), min(range(ranks), key=lambda r: (sums[r], r))
        gap, pairs = sums[most] - sums[least], itertools.product(shares[most], shares[least])
        swaps = [(abs(gap - 2 * (work[a] - work[b])), a, b) for a, b in pairs if 0 < work[a] - work[b] < gap]
        if not swaps:
            break
        _, a, b = min(swaps)
        shares[most][shares[most].index(a)], shares[least][shares[least].index(b)] = b, a
        sums[most], sums[least] = sums[most] + work[b] - work[a], sums[least] + work[a] - work[b]
    return [sorted(share) for share in shares]


@given(st.lists(st.integers(1, 40) | st.integers(1, 10**9), max_size=60), st.integers(1, 9))
def test_dealing_finds_the_shares_of_its_definition(work: list[int], ranks: int) -> None:
    assert balanced(work, ranks) == dealt_by_all_pairs(work, ranks)
