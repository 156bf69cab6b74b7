"""Attention by ptf's kernel against attention per document in float64, forward and backward."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model.attention import PerDocument
from ptf.model.cpu_kernels.attention import CpuAttention
from ptf.model.cpu_kernels.library import library

# of differences from float64, and the share of the largest gradient below which others may be rounding errors
BOUNDS = {torch.float32: (2e-5, 1e-2), torch.bfloat16: (2**-6, 1.0)}
DIMS = [library().width, 2 * library().width, 3 * library().width]


class Asked:
    """What an `Attend` asks a layer for."""

    def __init__(self, window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None) -> None:
        self.window, self.sinks, self.softcap, self.scale = window, sinks, softcap, 0.3


def batch_of(rows: list[list[tuple[int, list[tuple[int, int]]]]], room: int = 0) -> tuple[Tensor, Tensor]:
    """Segments and positions of families: a document's length, and for each that continues it, how many of its tokens
    are shared and how many follow."""
    width = max(sum(n + sum(own for _, own in more) for n, more in row) for row in rows) + room
    segments, positions = torch.full((len(rows), width), -1), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = number = 0
        for length, more in row:
            for shared, own in [(0, length), *((min(shared, length), own) for shared, own in more)]:
                segments[i, at : at + own] = number
                positions[i, at : at + own] = torch.arange(shared, shared + own)
                at, number = at + own, number + 1
    return segments, positions


def results(
    kind: Any, place: tuple[Tensor, Tensor], asked: Asked, heads: tuple[int, int], dim: int, dtype: Any
) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks, from numbers that bf16 holds."""
    g = torch.Generator().manual_seed(0)
    real = place[0] >= 0
    q, k, v = (
        torch.randn(*real.shape, n, dim, generator=g).bfloat16().to(dtype).requires_grad_() for n in (*heads, heads[1])
    )
    if asked.sinks is not None:
        asked.sinks = asked.sinks.detach().to(dtype).requires_grad_()
    out = kind(*place)(asked, q, k, v)
    upstream = torch.randn(out.shape, generator=g).bfloat16().to(dtype)
    (out * upstream * real[..., None, None]).sum().backward()
    inputs = (q, k, v) if asked.sinks is None else (q, k, v, asked.sinks)
    return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]


def difference(mine: list[Tensor], exact: list[Tensor], floor: float = 1e-2) -> float:
    """The largest difference of any tensor, as a share of its largest value, or of the `floor` of the largest of all
    where its own are less than that; of a tenth of the latter where a tensor is 0, as where each query has one key, and
    all that is computed is rounding errors."""
    assert len(mine) == len(exact) >= 4
    sizes = [float(t.abs().max()) for t in exact]
    most = max(sizes)
    least = [max(floor, 1e-1 if size < 1e-12 * most else 0.0) * most for size in sizes]
    apart = [float((a - b).abs().max()) for a, b in zip(mine, exact, strict=True)]
    return max(a / max(size, few) for a, size, few in zip(apart, sizes, least, strict=True))


family = st.tuples(st.integers(1, 70), st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), max_size=3))


@settings(deadline=None, max_examples=120)
@given(
    rows=st.lists(st.lists(family, max_size=3), min_size=1, max_size=2).filter(lambda rows: any(rows)),
    room=st.integers(0, 5),
    window=st.none() | st.integers(1, 90),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    dim=st.sampled_from(DIMS),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
)
def test_values_and_gradients_are_those_of_float64(rows, room, window, heads, dim, sinks, dtype) -> None:
    place, sink = batch_of(rows, room), torch.linspace(-2, 3, heads[0]).bfloat16().float() if sinks else None
    mine = results(CpuAttention, place, Asked(window, sink), heads, dim, dtype)
    exact = results(PerDocument, place, Asked(window, sink), heads, dim, torch.float64)
    assert all(t.dtype == dtype for t in mine)
    bound, floor = BOUNDS[dtype]
    assert difference(mine, exact, floor) <= bound
    assert all(not t[place[0] < 0].any() for t in mine[:4]), "padding gets zeros"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("lengths", [[600, 300], [257], [1] * 5])
def test_documents_of_several_chunks(lengths, dtype) -> None:
    place, sinks = batch_of([[(n, [(n // 2, 30)]) for n in lengths]]), torch.tensor([-1.0, 0.0, 0.5, 2.0])
    for window, sink in ((None, None), (40, sinks), (300, sinks)):
        mine = results(CpuAttention, place, Asked(window, sink), (4, 2), DIMS[1], dtype)
        exact = results(PerDocument, place, Asked(window, sink), (4, 2), DIMS[1], torch.float64)
        bound, floor = BOUNDS[dtype]
        assert difference(mine, exact, floor) <= bound


def test_bf16_is_rounded_once_on_each_way() -> None:
    place = batch_of([[(90, [(50, 20)]), (33, [])]])
    mine = results(CpuAttention, place, Asked(None), (4, 2), DIMS[1], torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in mine)
    exact = results(PerDocument, place, Asked(None), (4, 2), DIMS[1], torch.float64)
    assert difference(mine, exact) <= 8e-3  # two units in the last place: the output is rounded before its gradient


def test_bf16_is_as_near_as_torch_is() -> None:
    place = batch_of([[(290, [(250, 20), (7, 301)]), (33, [])]])
    exact = results(PerDocument, place, Asked(None), (4, 2), DIMS[1], torch.float64)
    mine, other = (
        difference(results(kind, place, Asked(None), (4, 2), DIMS[1], torch.bfloat16), exact)
        for kind in (CpuAttention, PerDocument)
    )
    assert mine <= 8e-3
    assert mine <= 2 * other


def test_a_wrong_window_a_neighbour_and_a_missing_sink_are_seen() -> None:
    place, sinks = batch_of([[(40, []), (30, [])]]), torch.linspace(-1, 1, 4)
    exact = results(PerDocument, place, Asked(9, sinks), (4, 2), DIMS[0], torch.float64)[:4]
    one = batch_of([[(70, [])]])
    for other, asked in ((place, Asked(10, sinks)), (one, Asked(9, sinks)), (place, Asked(9))):
        assert difference(results(CpuAttention, other, asked, (4, 2), DIMS[0], torch.float32)[:4], exact) > 1e-2


@pytest.mark.parametrize("dtype", BOUNDS)
def test_bits_depend_neither_on_threads_nor_on_neighbours(dtype) -> None:
    alone, among = batch_of([[(77, [(30, 9)])]]), batch_of([[(500, []), (77, [(30, 9)]), (41, [])]])
    where = slice(500, 500 + 86)

    def found(place, rows) -> list[Tensor]:
        g = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 700, n, DIMS[1], generator=g).to(dtype) for n in (4, 2, 2))
        q, k, v = (t[:, where].clone() if rows is None else t[:, : rows.stop + 41].clone() for t in (q, k, v))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = CpuAttention(*place)(Asked(), *inputs)
        out.square().sum().backward()
        return [t[:, rows or slice(None)] for t in (out.detach(), *(t.grad for t in inputs))]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first, few = found(alone, None), found(among, where)
        torch.set_num_threads(3)
        many = found(among, where)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first, few))
    assert all(map(torch.equal, few, many))


@pytest.mark.parametrize(
    ("asked", "dim", "dtype"),
    [
        (Asked(softcap=5.0), DIMS[0], torch.float32),
        (Asked(), DIMS[0] - 2, torch.float32),
        (Asked(), DIMS[0], torch.float64),
    ],
)
def test_torch_computes_what_the_kernel_does_not(asked, dim, dtype) -> None:
    place = batch_of([[(20, [(9, 5)])]])
    both = [results(kind, place, asked, (4, 2), dim, dtype) for kind in (CpuAttention, PerDocument)]
    assert all(map(torch.equal, *both))


def test_an_empty_batch_and_one_of_padding() -> None:
    place = torch.full((1, 6), -1), torch.zeros(1, 6, dtype=torch.long)
    q = torch.randn(1, 6, 2, DIMS[0], requires_grad=True)
    out = CpuAttention(*place)(Asked(), q, q, q)
    out.sum().backward()
    assert q.grad is not None
    assert not out.any()
    assert not q.grad.any()
