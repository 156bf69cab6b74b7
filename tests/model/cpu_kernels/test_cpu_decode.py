"""Attention over caches by ptf's kernel against float64."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model.cpu_kernels import decode
from ptf.model.cpu_kernels.library import library
from tests.model.cpu_kernels.test_cpu_attention import Asked

WIDTH = library().width


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Drawn:
    """Queries, keys and values of `n` responses, several to a context, and where each attends to."""

    def __init__(self, n: int, kv_heads: int, group: int, sizes: tuple[int, int], tokens: tuple[int, int], seed: int):
        g = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        (size, value_size), (longest, own) = sizes, tokens
        self.q, contexts = drawn(n, kv_heads * group, size) * 2, max(1, n // 2)
        self.contexts = drawn(contexts, kv_heads, longest, size), drawn(contexts, kv_heads, longest, value_size)
        self.own = drawn(n, kv_heads, own, size), drawn(n, kv_heads, own, value_size)
        bounds = [torch.randint(0, high + 1, (n, 2), generator=g).sort(1).values for high in (longest, own - 1)]
        bounds[1][:, 1] += 1  # at least one token
        self.places = torch.cat([torch.randint(0, contexts, (n, 1), generator=g), *bounds], 1)
        self.sinks = drawn(kv_heads * group)

    def exact(self, scale: float, sinks: Tensor | None) -> Tensor:
        """The attention of each response and head by itself, in float64."""
        rows = []
        for i, (context, start, stop, own_start, own_stop) in enumerate(self.places.tolist()):
            keys, values = (
                torch.cat([before[context, :, start:stop], mine[i, :, own_start:own_stop]], 1).double()
                for before, mine in zip(self.contexts, self.own, strict=True)
            )
            for head, query in enumerate(self.q[i].double()):
                kv = head // (self.q.shape[1] // len(keys))
                scores = scale * keys[kv] @ query
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, None].double()])
                rows.append(scores.softmax(0)[: len(keys[kv])] @ values[kv])
        return torch.stack(rows).unflatten(0, self.q.shape[:2])


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 16]),
    sizes=st.tuples(st.sampled_from([WIDTH, 2 * WIDTH, 5 * WIDTH]), st.sampled_from([WIDTH, 3 * WIDTH])),
    tokens=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_the_attention_of_float64(n, kv_heads, group, sizes, tokens, sinks, seed) -> None:
    drawn = Drawn(n, kv_heads, group, sizes, tokens, seed)
    asked = Asked(sinks=drawn.sinks if sinks else None)
    exact = drawn.exact(asked.scale, asked.sinks)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(decode.attention(asked, drawn.q, drawn.contexts, drawn.own, drawn.places))
    assert torch.equal(*found), "bits do not depend on threads"
    torch.testing.assert_close(found[0].double(), exact, atol=2e-5, rtol=1e-5)
    alone = decode.attention(asked, drawn.q[-1:], drawn.contexts, tuple(t[-1:] for t in drawn.own), drawn.places[-1:])
    assert torch.equal(alone, found[0][-1:]), "nor on other responses"


@pytest.mark.parametrize("column", range(5))
def test_a_token_or_a_context_that_is_not_its_own_is_seen(column: int) -> None:
    drawn = Drawn(4, 2, 2, (WIDTH, WIDTH), (9, 9), 0)
    drawn.places[:] = torch.tensor([0, 2, 7, 2, 7])
    exact = drawn.exact(0.3, drawn.sinks)
    drawn.places[:, column] += 1
    wrong = decode.attention(Asked(sinks=drawn.sinks), drawn.q, drawn.contexts, drawn.own, drawn.places)
    assert ((wrong - exact).abs().amax((1, 2)) > 1e-3).all()


def test_without_contexts_and_with_large_scores_and_a_nan() -> None:
    drawn = Drawn(3, 2, 2, (WIDTH, WIDTH), (5, 6), 0)
    drawn.places[:, :3] = 0
    drawn.q *= 1e3
    found = decode.attention(Asked(), drawn.q, None, drawn.own, drawn.places)
    torch.testing.assert_close(found.double(), drawn.exact(0.3, None), atol=1e-3, rtol=1e-4)
    drawn.q[1, 2, 0] = float("nan")
    found = decode.attention(Asked(), drawn.q, None, drawn.own, drawn.places)
    assert found.isnan().any(-1).nonzero().tolist() == [[1, 2]]


def test_what_it_leaves_to_torch() -> None:
    right = torch.zeros(2, WIDTH)
    assert decode.computes(Asked(), right, right)
    assert not decode.computes(Asked(softcap=30.0), right, right)
    assert not decode.computes(Asked(), right, right.bfloat16())
    assert not decode.computes(Asked(), right, torch.zeros(2, WIDTH + 1))
