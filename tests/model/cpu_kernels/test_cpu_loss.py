"""The loss of a head by ptf's kernel against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model import projection
from ptf.model.chunked import cross_entropy
from ptf.model.cpu_kernels.loss import write_gradient
from ptf.model.head import Head


def exact(logits: Tensor, real: int, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    logprobs = wide[:, :real].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (-weights * logprobs).sum().backward()
    assert wide.grad is not None
    return logprobs.detach(), wide.grad


def drawn(rows: int, columns: int, size: float, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * size).to(dtype)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 6),
    real=st.integers(1, 300),
    padding=st.integers(0, 20),
    size=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_logprobs_and_gradients_are_those_of_float64(rows, real, padding, size, dtype, data) -> None:
    logits = drawn(rows, real + padding, size, dtype)
    targets = torch.tensor(data.draw(st.lists(st.integers(0, real - 1), min_size=rows, max_size=rows)))
    weights = torch.linspace(-1, 2, rows)
    logprobs, gradient = exact(logits, real, targets, weights)
    kept = logits.clone()
    found = write_gradient(logits, real, targets, weights)
    assert torch.equal(write_gradient(kept, real, targets, None), found)
    assert torch.equal(kept, drawn(rows, real + padding, size, dtype)), "without weights nothing is written"
    torch.testing.assert_close(found.double(), logprobs, atol=3e-6, rtol=3e-7)
    coarse = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(logits.double(), gradient, atol=coarse * 2, rtol=coarse)
    assert not logits[:, real:].any()


def test_a_wrong_target_and_padding_that_counts_are_seen() -> None:
    logits = drawn(3, 40, 1.0, torch.float32)
    targets, weights = torch.tensor([1, 2, 3]), torch.ones(3)
    found = write_gradient(logits.clone(), 40, targets, weights)
    assert (write_gradient(logits.clone(), 40, targets + 1, weights) - found).abs().max() > 1e-2
    assert (write_gradient(logits.clone(), 39, targets, weights) - found).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 17, 38])
def test_a_nan_reaches_the_loss_and_the_gradient(dtype, at) -> None:
    logits = drawn(2, 39, 1.0, dtype)
    logits[1, at] = float("nan")
    found = write_gradient(logits, 39, torch.tensor([1, 2]), torch.ones(2))
    assert found.isnan().tolist() == [False, True]
    assert logits.isnan().any(1).tolist() == [False, True]


def test_no_gradient_is_denormal() -> None:
    logits = torch.zeros(1, 64)
    logits[0] = -torch.arange(64) * 1.5
    write_gradient(logits, 64, torch.tensor([0]), torch.tensor([1e-6]))
    small = logits[logits != 0].abs().min()
    assert small > torch.finfo(torch.float32).tiny
    assert (logits == 0).any(), "probabilities below e⁻⁶⁴ are 0"


@pytest.mark.parametrize("needs", ["both", "states", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_takes_the_kernel(dtype, needs, monkeypatch) -> None:
    monkeypatch.setattr("ptf.model.chunked.CHUNK_BYTES", 7 * 50 * dtype.itemsize)  # several chunks of 7 rows
    monkeypatch.setattr(projection, "BLOCK", 17)  # of rows of the head's gradient
    chunks, write = [], write_gradient
    monkeypatch.setattr(projection, "write_gradient", lambda x, *rest: chunks.append(len(x)) or write(x, *rest))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1, 23, 19, generator=g).to(dtype).requires_grad_(needs in ("both", "states"))
    weight = torch.randn(50, 19, generator=g).to(dtype).requires_grad_(needs in ("both", "weight"))
    targets, weights = torch.randint(0, 47, (1, 23), generator=g), torch.rand(1, 23, generator=g)
    found = []
    for kernels in (True, False):
        loss = cross_entropy(x, Head(weight, 47, cpu_kernels=kernels), targets, weights)
        tensors = [t for t in (x, weight) if t.requires_grad]
        found.append([loss.detach(), *(torch.autograd.grad(loss, tensors) if tensors else ())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5 if dtype == torch.float32 else 3e-2, rtol=1e-2)
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-5)
    assert chunks == [7, 7, 7, 2], "once, with the kernels"


def test_a_target_that_is_no_column_raises() -> None:
    for targets in ([0, 40], [-100, 0]):
        with pytest.raises(IndexError, match="a target is not among the 40 columns"):
            write_gradient(drawn(2, 50, 1.0, torch.float32), 40, torch.tensor(targets), torch.ones(2))
    found = write_gradient(drawn(2, 50, 1.0, torch.float32), 40, torch.tensor([3, 4], dtype=torch.int32), None)
    assert torch.equal(found, write_gradient(drawn(2, 50, 1.0, torch.float32), 40, torch.tensor([3, 4]), None))
