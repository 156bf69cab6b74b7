"""Chunked losses against the dense computation."""

import pytest
import torch

from ptf.model import chunked
from ptf.model.chunked import cross_entropy, token_logprobs


@pytest.fixture
def problem():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 13, 16, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(31, 16, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (2, 13), generator=g)
    weights = torch.rand(2, 13, generator=g) * (torch.rand(2, 13, generator=g) > 0.4)
    return x, head, targets, weights


@pytest.mark.parametrize("chunk", [64 << 20, 31 * 4 * 3, 1])
def test_cross_entropy_equals_dense(problem, chunk, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", chunk)
    x, head, targets, weights = problem
    ours = cross_entropy(x, head, targets, weights)
    dense = (torch.nn.functional.cross_entropy((x @ head.t()).flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()
    assert abs(float(ours) - float(dense)) <= 1e-6 * float(dense)
    mine, theirs = torch.autograd.grad(3 * ours, (x, head)), torch.autograd.grad(3 * dense, (x, head))
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-6


@pytest.mark.parametrize("chunk", [64 << 20, 31 * 4 * 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropy_equal_dense(problem, chunk, temperature, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", chunk)
    x, head, targets, weights = problem
    logprobs, entropy = token_logprobs(x, head, targets, weights, temperature)
    every = ((x @ head.t()) / temperature).log_softmax(-1)
    dense = every.gather(-1, targets[..., None]).squeeze(-1)
    kept = weights != 0
    assert (logprobs[kept] - dense[kept]).abs().max() <= 1e-5
    assert (entropy[kept] + (every.exp() * every).sum(-1)[kept]).abs().max() <= 1e-5
    assert not logprobs[~kept].any()
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)) * kept
    mine = torch.autograd.grad((logprobs * upstream).sum(), (x, head))
    theirs = torch.autograd.grad((dense * upstream).sum(), (x, head))
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-5


def test_nothing_to_train_gives_zero_and_zero_gradients(problem):
    x, head, targets, weights = problem
    loss = cross_entropy(x, head, targets, torch.zeros_like(weights))
    assert float(loss) == 0
    for grad in torch.autograd.grad(loss, (x, head)):
        assert not grad.any()
