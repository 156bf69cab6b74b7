"""Norms, gates and rotations by ptf's kernels against the model's own functions, in float64 and to the bit in bf16."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model.config import Rope
from ptf.model.cpu_kernels import layers
from ptf.model.cpu_kernels.library import library
from ptf.model.layers import gated, gelu_tanh, normalised
from ptf.model.rope import rotary, rotate

W = library().width
CHOICES = [W, 2 * W, 5 * W]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)


def both(mine: Callable, exact: Callable, *inputs: Tensor, dtype: torch.dtype = torch.float32) -> tuple[list, list]:
    """The value and the gradients of inputs, by a kernel in a dtype and by a function in float64."""
    found = []
    for compute, kind in ((mine, dtype), (exact, torch.float64)):
        given_ = [t.detach().clone().to(kind).requires_grad_() for t in inputs]  # a gate writes over its inputs
        out = compute(*given_)
        out.backward(drawn(*out.shape, seed=9, dtype=kind))
        found.append([out.detach(), *(t.grad for t in given_)])
    return found[0], found[1]


def away(mine: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(mine, exact, strict=True))


def table(rows: int, turned: int) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(torch.arange(rows)[None], turned, Rope(theta=100.0))[:2]
    return cos, sin


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(shapes, st.sampled_from(CHOICES), st.sampled_from([1e-6, 1e-2]))
def test_a_norm_is_that_of_float64(rows, dim, eps) -> None:
    x, weight = drawn(*rows, dim), drawn(dim, seed=1)
    mine, exact = both(lambda x, w: layers.norm(x, w, eps, False), lambda x, w: normalised(x, w, eps, False), x, weight)
    assert away(mine, exact) <= 2e-5
    wrong, _ = both(
        lambda x, w: layers.norm(x, w, eps + 0.1, False), lambda x, w: normalised(x, w, eps, False), x, weight
    )
    assert away(wrong, exact) > 1e-3


@settings(deadline=None, max_examples=40)
@given(shapes, st.sampled_from(CHOICES), st.sampled_from([0.1, 1.0, 60.0]))
def test_a_gate_is_that_of_float64(rows, dim, size) -> None:
    x, up = drawn(*rows, dim) * size, drawn(*rows, dim, seed=1)
    mine, exact = both(lambda x, u: layers.gate(F.silu, x, u), lambda x, u: gated(F.silu, x, u), x, up)
    assert away(mine, exact) <= 2e-5


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([2 * W, 4 * W]), st.sampled_from([0, 2, W]))
def test_a_rotation_is_that_of_float64(rows, heads, turned, rest) -> None:
    x, tables = drawn(1, rows, heads, turned + rest), table(rows, turned)
    exactly = tuple(t.double() for t in tables)
    mine, exact = both(lambda x: layers.rotation(x, tables), lambda x: rotate(x, exactly), x)
    assert away(mine, exact) <= 2e-6


@pytest.mark.parametrize("strided", [False, True])
def test_inputs_that_are_no_rows_in_memory(strided) -> None:
    def of(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if strided else x

    x, w, tables = drawn(6, 4, 2, 2 * W), drawn(2 * W), table(6 if strided else 4, 2 * W)
    exactly = tuple(t.double() for t in tables)
    for mine, exact in (
        (lambda x: layers.norm(of(x), w, 1e-6, False), lambda x: normalised(of(x), w.double(), 1e-6, False)),
        (lambda x: layers.gate(F.silu, of(x), of(x) + 0), lambda x: gated(F.silu, of(x), of(x))),
        (lambda x: layers.rotation(of(x)[:1], tables), lambda x: rotate(of(x)[:1], exactly)),
    ):
        assert away(*both(mine, exact, x)) <= 2e-5


def test_bf16_is_rounded_where_torch_rounds_it() -> None:
    x, w, tables = drawn(50, 3, 2 * W, dtype=torch.bfloat16), drawn(2 * W, dtype=torch.bfloat16), table(50, 2 * W)
    mine, theirs = layers.norm(x, w, 1e-6, False), normalised(x, w, 1e-6, False)
    assert (mine != theirs).float().mean() < 1e-3, "the sums of squares are added in another order"
    assert torch.equal(layers.rotation(x[None], tables), rotate(x[None], tables))
    mine, theirs = layers.gate(F.silu, x, 2 * x), gated(F.silu, x, 2 * x)
    assert (mine != theirs).float().mean() < 1e-2, "exponentials differ by units in the last place"
    mine, exact = both(lambda x, u: layers.gate(F.silu, x, u), lambda x, u: gated(F.silu, x, u), x, x, dtype=x.dtype)
    assert away(mine, exact) <= 2**-7
    mine, exact = both(
        lambda x, w: layers.norm(x, w, 1e-6, False), lambda x, w: normalised(x, w, 1e-6, False), x, w, dtype=x.dtype
    )
    assert away(mine, exact) <= 2**-7


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.sampled_from([1e-30, 1.0, 1e30]))
def test_rounding_to_bf16_is_torchs(seed, size) -> None:
    x = (drawn(1, 1, 1, 2 * W, seed=seed) * size).bfloat16()
    tables = torch.linspace(0.1, 1.9, 2 * W)[None, None, None], torch.linspace(-1.7, 1.3, 2 * W)[None, None, None]
    assert torch.equal(layers.rotation(x, tables), rotate(x, tables))


def test_a_nan_and_an_infinity_stay() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2, W, dtype=dtype)
        x[0, 3], x[1, 2] = float("nan"), float("inf")
        ones = torch.ones_like(x)
        assert layers.norm(x, ones[0], 1e-6, False)[0].isnan().all()
        assert layers.gate(F.silu, x, ones)[0, 3].isnan()
        assert layers.gate(F.silu, x, ones)[1, 2].isinf()


def test_the_weights_gradient_does_not_depend_on_threads() -> None:
    x, w, found = drawn(333, 132 * W), drawn(132 * W), []
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            weight = w.clone().requires_grad_()
            layers.norm(x, weight, 1e-6, False).square().sum().backward()
            found.append(weight.grad)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_torch_computes_what_the_kernels_do_not() -> None:
    x, odd = drawn(3, 2 * W), drawn(3, W + 1)
    for mine, theirs in (
        (layers.norm(x, x[0], 1e-6, True), normalised(x, x[0], 1e-6, True)),
        (layers.norm(odd, odd[0], 1e-6, False), normalised(odd, odd[0], 1e-6, False)),
        (layers.norm(x.double(), x[0].double(), 1e-6, False), normalised(x.double(), x[0].double(), 1e-6, False)),
        (layers.gate(gelu_tanh, x, x), gated(gelu_tanh, x, x)),
        (layers.gate(F.silu, odd, odd), gated(F.silu, odd, odd)),
        (layers.rotation(x[None, :, None], table(3, W)), rotate(x[None, :, None], table(3, W))),
        (layers.rotation(x[None, :, None], table(1, 2 * W)), rotate(x[None, :, None], table(1, 2 * W))),
        (layers.norm(x, x[0, :1], 1e-6, False), normalised(x, x[0, :1], 1e-6, False)),
        (layers.gate(F.silu, x, x[:1] + 0), gated(F.silu, x, x[:1] + 0)),
    ):
        assert torch.equal(mine, theirs)


def test_a_gate_whose_inputs_are_one_tensor() -> None:
    mine, exact = both(lambda x: layers.gate(F.silu, x, x), lambda x: gated(F.silu, x, x), drawn(3, W))
    assert away(mine, exact) <= 2e-5


def test_a_second_backward_of_a_gate_raises() -> None:
    x = drawn(3, W).requires_grad_()
    out = layers.gate(F.silu, x * 1, x * 1).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
