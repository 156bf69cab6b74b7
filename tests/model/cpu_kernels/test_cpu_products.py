"""The log-probs of a head and the gradients of projections in bf16, with ptf's own products, against float64."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model import chunked
from ptf.model.chunked import cross_entropy, surrogate, token_logprobs
from ptf.model.cpu_kernels import head as cpu_head
from ptf.model.cpu_kernels.layers import linear
from ptf.model.cpu_kernels.library import library
from ptf.model.head import Head
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing

ROUNDED = 1.02 * 2**-8  # of a number, by rounding it to bf16 and in fp32 before that


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    if not library().multiplies_pairs:
        pytest.skip("this CPU has no AVX512-BF16, or multiplies matrices of bf16 (AMX)")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * size).bfloat16()


class Exact:
    """The log-probs, entropies and gradients of −Σ weights · log-prob in float64, and what rounding may change each
    by."""

    def __init__(self, x: Tensor, weight: Tensor, real: int, targets: Tensor, weights: Tensor) -> None:
        x, weight, weights = x.double(), weight[:real].double(), weights.double()
        logits = x @ weight.T
        self.logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        self.entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        hit = torch.nn.functional.one_hot(targets, real) * weights[:, None]
        grad = logits.log_softmax(-1).exp() * weights[:, None] - hit
        self.dx, self.dweight = grad @ weight, grad.T @ x
        # exponentials and gradients are rounded, and then the results; fp32 has rounded the logits
        self.of_logprobs = 2e-6 + 1e-6 * float(logits.abs().max())
        of_grad = (2 * ROUNDED + 10 * self.of_logprobs) * grad.abs() + self.of_logprobs * hit.abs()
        self.of_dx = of_grad @ weight.abs() + ROUNDED * self.dx.abs() + 1e-30
        self.of_dweight = of_grad.T @ x.abs() + ROUNDED * self.dweight.abs() + 1e-30


def computed(x: Tensor, weight: Tensor, real: int, targets: Tensor, weights: Tensor) -> cpu_head.HeadLogprobs:
    return cpu_head.logprobs(x, weight, real, targets, weights, of_x=True, of_weight=True)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 150),
    width=st.sampled_from([32, 64, 160]),
    real=st.integers(1, 700),
    padding=st.integers(0, 20),
    size=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    chunk=st.sampled_from([1, 40, 1536]),
    seed=st.integers(0, 1000),
)
@example(rows=70, width=32, real=513, padding=3, size=1.0, chunk=40, seed=0)
def test_losses_and_gradients_are_those_of_float64(rows, width, real, padding, size, chunk, seed) -> None:
    x, weight = drawn(rows, width), drawn(real + padding, width, size=size)
    g = torch.Generator().manual_seed(seed)
    targets, weights = torch.randint(0, real, (rows,), generator=g), torch.rand(rows, generator=g) * 2 - 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_head, "ROWS", chunk)
        found, entropies, dx, dweight = computed(x, weight, real, targets, weights)
        alone = cpu_head.logprobs(x, weight, real, targets, None, of_x=False, of_weight=False)
    exact = Exact(x, weight, real, targets, weights)
    torch.testing.assert_close(found.double(), exact.logprobs, atol=exact.of_logprobs, rtol=1e-6)
    torch.testing.assert_close(entropies.double(), exact.entropies, atol=10 * exact.of_logprobs, rtol=1e-6)
    assert dx is not None
    assert dweight is not None
    assert ((dx.double() - exact.dx).abs() <= exact.of_dx).all()
    assert ((dweight[:real].double() - exact.dweight).abs() <= exact.of_dweight).all()
    assert not dweight[real:].any(), "padding has no gradient"
    assert torch.equal(alone.logprobs, found)
    assert torch.equal(alone.entropies, entropies)
    assert alone[2:] == (None, None)


def test_a_wrong_target_a_weight_and_padding_that_counts_are_seen() -> None:
    x, weight, targets, weights = drawn(40, 64), drawn(300, 64), torch.arange(40), torch.ones(40)
    exact = Exact(x, weight, 299, targets, weights)
    for real, at, of in ((299, targets + 1, weights), (299, targets, weights * 1.1), (300, targets, weights)):
        found, entropies, dx, dweight = computed(x, weight, real, at, of)
        assert dx is not None
        assert dweight is not None
        assert not ((dx.double() - exact.dx).abs() <= exact.of_dx).all()
        assert not ((dweight[:299].double() - exact.dweight).abs() <= exact.of_dweight).all()
        assert torch.equal(found, computed(x, weight, 299, targets, weights).logprobs) == (of is not weights)
        torch.testing.assert_close(entropies.double(), exact.entropies, atol=1e-4 if real == 299 else 1, rtol=0)
        assert (real == 299) == bool(((entropies - exact.entropies).abs() < 1e-4).all())


@pytest.mark.parametrize("rows", [1536, 40])
def test_bits_do_not_depend_on_threads_or_on_what_is_asked_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = drawn(90, 64), drawn(1100, 64), torch.arange(90) * 12
    weights, found = torch.rand(90), []
    monkeypatch.setattr(cpu_head, "ROWS", rows)
    for threads in (1, 2, 9):  # and five blocks of tokens
        torch.set_num_threads(threads)
        found.append(computed(x, weight, 1090, targets, weights))
    for other in found[1:]:
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    for of_x in (True, False):
        part = cpu_head.logprobs(x, weight, 1090, targets, weights, of_x=of_x, of_weight=not of_x)
        assert (part.of_x is None, part.of_weight is None) == (not of_x, of_x)
        kept, all_of_it = (part.of_x, found[0].of_x) if of_x else (part.of_weight, found[0].of_weight)
        assert kept is not None
        assert all_of_it is not None
        assert torch.equal(kept, all_of_it)


def test_large_logits_and_a_nan() -> None:
    x, weight, targets, weights = drawn(40, 64, size=100.0), drawn(600, 64), torch.arange(40), torch.ones(40)
    found, entropies, dx, _ = computed(x, weight, 600, targets, weights)
    exact = Exact(x, weight, 600, targets, weights)
    torch.testing.assert_close(found.double(), exact.logprobs, atol=1e-2, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), exact.entropies, atol=1e-2, rtol=1e-5)
    assert dx is not None
    assert dx.isfinite().all()
    x[3, 5] = float("nan")
    found, entropies, dx, dweight = computed(x, weight, 600, targets, weights)
    assert dx is not None
    assert dweight is not None
    assert entropies.isnan().nonzero().flatten().tolist() == [3]
    assert found.isnan().nonzero().flatten().tolist() == [3] == dx.isnan().any(1).nonzero().flatten().tolist()
    assert dweight.isnan().any(1).all()


def test_a_target_that_is_no_token_raises_and_no_rows_have_no_gradient() -> None:
    x, weight = drawn(2, 32), drawn(50, 32)
    for targets in ([0, 40], [-100, 0]):
        with pytest.raises(IndexError, match="a target is not among the 40 columns"):
            computed(x, weight, 40, torch.tensor(targets), torch.ones(2))
    found, entropies, dx, dweight = computed(x[:0], weight, 40, torch.zeros(0, dtype=torch.long), torch.ones(0))
    assert len(found) == len(entropies) == 0
    assert dx is not None
    assert dx.shape == (0, 32)
    assert dweight is not None
    assert dweight.shape == weight.shape
    assert not dweight.any()


def losses_of(x: Tensor, head: Head, processing: LogitsProcessing) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Each function's loss, whose gradient is tested, and its values."""
    targets, weights = torch.arange(23)[None], torch.linspace(0, 1, 23)[None]
    coefficients = torch.linspace(-1, 1, 23)[None]
    if processing == NO_LOGITS_PROCESSING:
        yield cross_entropy(x, head, targets, weights), ()
    loss, values = surrogate(x, head, targets, weights, coefficients, processing)
    yield loss, values
    values = token_logprobs(x, head, targets, weights, processing)
    yield (values.logprobs * coefficients).sum(), values


@pytest.mark.parametrize(("width", "temperature", "calls"), [(64, 1.0, [22] * 4), (48, 1.0, []), (64, 0.7, [])])
def test_losses_take_the_kernel(
    width: int, temperature: float, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compute = [], cpu_head.logprobs
    monkeypatch.setattr(chunked.cpu_head, "logprobs", lambda x, *a, **k: made.append(len(x)) or compute(x, *a, **k))
    x, weight = drawn(1, 23, width).requires_grad_(), drawn(50, width).requires_grad_()
    found = []
    for kernels in (True, False):
        head = Head(weight, 47, cpu_kernels=kernels)
        for loss, values in losses_of(x, head, LogitsProcessing(temperature)):
            found.append([loss.detach(), *torch.autograd.grad(loss * 3, (x, weight)), *values])
    half = len(found) // 2
    for mine, theirs in zip(found[:half], found[half:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=0.15, rtol=2e-2)
            assert not a.any() or a.ndim == 0 or not torch.allclose(a, b.roll(1, -1), atol=0.15, rtol=2e-2)
    assert made == calls, "with the kernels, of the positions whose weight is not 0; log-probs again for the gradient"


@pytest.mark.parametrize("size", [0.2, 3.0])
def test_the_gradient_of_an_entropy_does_not_take_the_kernel(size: float) -> None:
    x, weight = drawn(1, 23, 64).requires_grad_(), drawn(50, 64, size=size).requires_grad_()
    found = []
    for kernels in (True, False):
        values = token_logprobs(x, Head(weight, 47, cpu_kernels=kernels), torch.arange(23)[None], torch.ones(1, 23))
        found.append(torch.autograd.grad((values.entropy + values.logprobs).sum(), (x, weight)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.any()
        assert torch.equal(mine, theirs), "all of it is computed from the logits that PyTorch computes"


@pytest.mark.parametrize("of_x", [True, False])
def test_a_gradient_of_one_input_is_the_same_as_with_the_others(of_x: bool) -> None:
    x, weight = drawn(1, 23, 64), drawn(50, 64)
    found = []
    for wanted in ((True, True), (of_x, not of_x)):
        inputs = [t.clone().requires_grad_(wants) for t, wants in zip((x, weight), wanted, strict=True)]
        for loss, _ in losses_of(inputs[0], Head(inputs[1], 47, cpu_kernels=True), NO_LOGITS_PROCESSING):
            found.append(torch.autograd.grad(loss, inputs[0 if of_x else 1])[0])
    assert len(found) == 6
    assert all(map(torch.equal, found[:3], found[3:]))


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 700),
    out=st.sampled_from([32, 96, 416, 800]),
    inner=st.sampled_from([32, 288, 544]),
    threads=st.sampled_from([1, 2, 7]),
    bias=st.booleans(),
)
def test_gradients_of_a_projection_are_those_of_float64(rows, out, inner, threads, bias) -> None:
    x, weight = drawn(rows, inner).requires_grad_(), drawn(out, inner).requires_grad_()
    shift, upstream = drawn(out).requires_grad_(bias), drawn(rows, out)
    y = linear(x, weight, shift if bias else None)
    assert type(y.grad_fn).__name__ == "_PairedLinearBackward"
    assert torch.equal(y, torch.nn.functional.linear(x, weight, shift if bias else None))
    found = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        found.append(torch.autograd.grad(y, (x, weight, *([shift] if bias else [])), upstream, retain_graph=True))
    assert torch.equal(found[0][1], found[1][1]), "bits do not depend on threads"
    wide, given_x = upstream.double(), x.detach().double()
    exact, most = wide.T @ given_x, wide.abs().T @ given_x.abs()
    assert ((found[0][1].double() - exact).abs() <= ROUNDED * exact.abs() + 1e-6 * most).all()
    assert not ((found[0][1].double() - exact.roll(1, 0)).abs() <= ROUNDED * exact.abs() + 1e-6 * most).all()
    torch.testing.assert_close(found[0][0].double(), wide @ weight.detach().double(), atol=0.5, rtol=2e-2)
    if bias:
        torch.testing.assert_close(found[0][2].double(), wide.sum(0), atol=0.5, rtol=2e-2)


def test_what_a_projection_leaves_to_torch() -> None:
    x, weight = drawn(5, 64).requires_grad_(), drawn(96, 64).requires_grad_()
    assert "_PairedLinear" in str(linear(x, weight, None).grad_fn)
    assert "_PairedLinear" not in str(linear(x, weight.detach(), None).grad_fn)
    assert "_PairedLinear" not in str(linear(x[:, :48], weight[:, :48], None).grad_fn)
    assert "_PairedLinear" not in str(linear(x.float(), weight.float(), None).grad_fn)
    assert "_PairedLinear" not in str(linear(x[:0], weight, None).grad_fn)
    frozen = linear(x.detach(), weight, None)
    assert torch.autograd.grad(frozen.sum(), weight)[0].shape == weight.shape
