"""Tokens that the native engine draws lie where float64 has them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model.sampling import NEVER
from ptf.rl.engines.response import draw


def apart(logits: Tensor, temperature: Tensor, draws: Tensor, tokens: Tensor) -> float:
    """How far a draw lies outside its token's part of the distribution, at most."""
    p = (logits.double() / temperature.double()[:, None]).softmax(-1)
    after = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    before = after - p.gather(1, tokens[:, None])[:, 0]
    assert (p.gather(1, tokens[:, None]) > 0).all(), "no token of probability 0"
    return float(torch.maximum(before - draws, draws - after).max())


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 200),
    never=st.integers(0, 3),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_draw_lies_in_its_tokens_part(rows, columns, never, size, bf16, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=g) * size
    logits[:, columns - min(never, columns - 1) :] = NEVER
    logits = logits.bfloat16() if bf16 else logits
    temperature, ones = torch.rand(rows, generator=g) + 0.1, torch.ones(rows)
    draws = torch.rand(rows, dtype=torch.float64, generator=g).clamp_(max=0.999)
    draws[0] = [0.0, 0.999][seed % 2]
    tokens, logprobs = draw(logits, temperature, ones, draws)
    assert apart(logits, temperature, draws, tokens) < 1e-6
    alone = draw(logits[-1:], temperature[-1:], ones[-1:], draws[-1:])
    assert int(alone[0]) == int(tokens[-1]), "a draw does not depend on other rows"
    exact = (logits.double() / temperature.double()[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-5, rtol=1e-6)


def test_other_draws_and_temperatures_are_other_tokens() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    draws = torch.linspace(0, 0.8, 64, dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.ones(64), torch.ones(64), draws)
    assert apart(logits, torch.ones(64), draws + 0.1, tokens) > 0.05
    assert apart(logits, torch.full((64,), 2.0), draws, tokens) > 0.05
    other, _ = draw(logits, torch.ones(64), torch.ones(64), draws + 0.1)
    assert (other != tokens).any()
    assert not torch.allclose(logprobs, logits.gather(1, tokens[:, None])[:, 0], atol=0.1)
