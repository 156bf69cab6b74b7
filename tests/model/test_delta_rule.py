"""The gated delta rule in chunks equals the recurrence token by token, in fp64; documents share nothing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model.kernels.delta_rule import Chunks, chunked, convolve, step, windows

HEADS, KEY, VALUE = 2, 5, 3
DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def batch(lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """Return segments and positions of one packed sequence, [1, T]."""
    segments = np.repeat([*range(len(lengths)), -1], [*lengths, padding])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(padding, np.int64)])
    return torch.from_numpy(segments)[None], torch.from_numpy(positions)[None]


def inputs(n: int, seed: int) -> list[Tensor]:
    """Return random q, k, v, decay and beta of n tokens, in fp64; keys have length 1."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, HEADS, size, generator=g, dtype=torch.float64) for size in (KEY, KEY, VALUE))
    decay = -torch.rand(n, HEADS, generator=g, dtype=torch.float64) * 2
    beta = torch.rand(n, HEADS, generator=g, dtype=torch.float64)
    return [t.requires_grad_() for t in (q, F.normalize(k, dim=-1), v, decay, beta)]


def recurrence(inputs: list[Tensor], lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """Return what the rule gives token by token, and each document's last state."""
    outs, states = [], []
    for part in zip(*(t[: sum(lengths)].split(lengths) for t in inputs), strict=True):
        state = torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64)
        for token in zip(*part, strict=True):
            out, state = step(state, *(t[None] for t in token))
            outs.append(out[0])
        states.append(state[0])
    return torch.cat((torch.stack(outs), torch.zeros(padding, HEADS, VALUE, dtype=torch.float64))), torch.stack(states)


@given(DOCUMENTS, st.integers(0, 5), st.sampled_from([1, 4, 16, 32]), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_chunks_equal_the_recurrence(lengths: list[int], padding: int, size: int, seed: int) -> None:
    segments, _ = batch(lengths, padding)
    values = inputs(segments.numel(), seed)
    out, states = chunked(*values, Chunks.of(segments, size))
    right, right_states = recurrence(values, lengths, padding)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mine = torch.autograd.grad((out * upstream).sum() + states.sum(), values)
    theirs = torch.autograd.grad((right * upstream).sum() + right_states.sum(), values)
    for a, b in zip((out, states, *mine), (right, right_states, *theirs), strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-9


def test_a_wrong_chunk_is_found() -> None:
    """A control: without the decay between chunks the same comparison fails."""
    values, lengths = inputs(40, 0), [40]
    segments, _ = batch(lengths, 0)
    chunks = Chunks.of(segments, 8)
    wrong, _ = chunked(*values[:3], torch.where(torch.arange(40)[:, None] % 8 == 7, 0, values[3]), values[4], chunks)
    assert float((wrong - recurrence(values, lengths, 0)[0]).detach().abs().max()) > 1e-3


@given(DOCUMENTS, st.integers(0, 5), st.integers(1, 4), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_convolution_stays_inside_documents(lengths: list[int], padding: int, width: int, seed: int) -> None:
    segments, positions = batch(lengths, padding)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, segments.numel(), 6, generator=g, dtype=torch.float64)
    weight = torch.randn(6, 1, width, generator=g, dtype=torch.float64)
    out = convolve(x, positions, weight)[0]
    last = windows(x, Chunks.of(segments, 4), width)
    first = 0
    for number, length in enumerate(lengths):
        alone = F.pad(x[0, first : first + length].t(), (width - 1, 0))
        assert torch.allclose(out[first : first + length].t(), F.conv1d(alone, weight, groups=6), atol=1e-12)
        assert torch.equal(last[number].t(), alone[:, alone.shape[1] - width + 1 :])
        first += length


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_document_of_nan_changes_no_bit_of_others(poison: float) -> None:
    lengths = [37, 20, 3, 41]
    segments, positions = batch(lengths, 5)
    bad = (segments == 1)[0]

    def run(poisoned: bool) -> list[Tensor]:
        values = [t.detach().float() for t in inputs(segments.numel(), 3)]
        x = torch.randn(1, segments.numel(), 4, generator=torch.Generator().manual_seed(1))
        if poisoned:
            x[:, bad] = poison
            values = [torch.where(bad.view(-1, *[1] * (t.dim() - 1)), poison, t) for t in values]
        values = [t.requires_grad_() for t in (*values, x)]
        out, states = chunked(*values[:5], Chunks.of(segments, 8))
        mixed = convolve(values[5], positions, torch.ones(4, 1, 3))
        loss = out[~bad].square().sum() + mixed[:, ~bad].square().sum()
        gradients = torch.autograd.grad(loss, values)
        return [out[~bad], mixed[:, ~bad], states[[0, 2, 3]]] + [
            (t[0] if t.dim() == 3 and len(t) == 1 else t)[~bad] for t in gradients
        ]

    for clean, poisoned in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, poisoned)
