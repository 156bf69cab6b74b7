"""Documents of one packed row never see each other: not in logits, not in gradients, in no family, under no packing."""

import random
import tempfile
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.model import attention, bridge
from ptf.model.attention import Flex, PerDocument, band
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.verify import random_reference
from tests.tiny import packed

WIDTH = 48


@cache
def model_of(model_type: str) -> Decoder:
    config = family_of({"model_type": model_type}).small(random.Random(f"attention/{model_type}"))
    with tempfile.TemporaryDirectory() as directory:
        random_reference(config, 0).save_pretrained(directory)
        model, family = bridge.build(bridge.Path(directory))
        bridge.materialize(model, torch.device("cpu"))
        bridge.load_hf(model, bridge.Path(directory), family)
    return model


@st.composite
def packings(draw: st.DrawFn) -> list[list[int]]:
    """Two rows of documents; the last may leave padding."""
    rows = []
    for _ in range(2):
        row: list[int] = []
        while sum(row) < WIDTH and (not row or draw(st.booleans()) or sum(row) < 20):
            row.append(draw(st.integers(1, WIDTH - sum(row))))
        rows.append(row)
    return rows


def run(model: Decoder, tokens: Tensor, batch, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of every position, and the gradient that each position sends to its own embedding."""
    embedded: list[Tensor] = []
    hook = model.embed.register_forward_hook(lambda module, args, out: embedded.append(out.detach().requires_grad_()) or embedded[-1])
    try:
        logits = model(tokens, batch.positions, batch.segments, lambda x, head: head.logits(x))
    finally:
        hook.remove()
    (logits * upstream).sum().backward(inputs=embedded)
    return logits.detach(), embedded[0].grad


def leak(model: Decoder, rows: list[list[int]], chosen: int) -> float:
    """How far logits and gradients of the other documents move, relative to the largest, when the tokens of one change."""
    batch = packed(rows, WIDTH)
    tokens = batch.tokens % model.config.vocab
    own = batch.segments == chosen % sum(map(len, rows))
    others = (batch.segments >= 0) & ~own
    upstream = torch.randn(*tokens.shape, model.config.vocab, generator=torch.Generator().manual_seed(1)) * (batch.segments >= 0)[..., None]
    before = run(model, tokens, batch, upstream)
    after = run(model, torch.where(own, (tokens + 1) % model.config.vocab, tokens), batch, upstream)
    assert not torch.equal(before[0][own], after[0][own])
    return max(float((a - b)[others].abs().max() / a.abs().max()) if others.any() else 0.0 for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("model_type", [m for m in MODULES if m != "gemma3"])
@settings(max_examples=15, deadline=None)
@given(rows=packings(), chosen=st.integers(0, 100))
def test_a_document_does_not_move_another(model_type: str, rows: list[list[int]], chosen: int) -> None:
    assert leak(model_of(model_type), rows, chosen) == 0.0


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_a_leak_is_seen(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows attended to as a whole."""
    model = model_of(model_type)
    whole = lambda segments, positions: PerDocument(torch.arange(len(segments))[:, None].expand_as(segments), positions)  # noqa: E731
    monkeypatch.setattr(attention, "backend", lambda device: whole)
    monkeypatch.setattr("ptf.model.decoder.backend", attention.backend)
    assert leak(model, [[10, 20, 18], [30, 18]], 0) > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_the_masks_of_a_gpu_see_what_a_cpu_sees(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, not compiled (torch has no backward for it on a CPU), in layers with and without window, with and without sinks."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)
    model = model_of(model_type)
    batch = packed([[10, 20, 18], [30, 1]], WIDTH)
    tokens = batch.tokens % model.config.vocab
    with torch.no_grad():
        both = [
            model(tokens, batch.positions, batch.segments, lambda x, head: head.logits(x), kind(batch.segments, batch.positions))
            for kind in (PerDocument, Flex)
        ]
    assert (both[0] - both[1])[batch.segments >= 0].abs().max() <= 1e-5 * both[0].abs().max()


@pytest.mark.parametrize("window", [1, 2, 7, 30, 31])
def test_a_window_is_the_last_keys_its_own_included(window: int) -> None:
    seen = band(30, window)
    at = torch.arange(30)
    expected = (at[:, None] >= at) & (at > at[:, None] - window)
    assert torch.equal(expected, torch.ones(30, 30).tril().bool() if seen is None else seen)
    assert (seen is None) == (window >= 30)


def test_sinks_take_attention_from_every_key() -> None:
    """Against softmax with one more logit, written out."""
    model = model_of("gpt_oss")
    of = model.layers[0].attn
    heads, size = model.config.heads, model.config.head_dim
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 9, size, generator=g) for n in (heads, model.config.kv_heads, model.config.kv_heads))
    seen = torch.ones(9, 9).tril().bool()
    keys, values = (t.repeat_interleave(heads // model.config.kv_heads, 1) for t in (k, v))
    logits = (q @ keys.transpose(-2, -1) * of.scale).masked_fill(~seen, -torch.inf)
    share = torch.cat((logits, of.sinks[None, :, None, None].expand(1, heads, 9, 1)), -1).softmax(-1)[..., :-1]
    for mask in (None, seen):
        assert (attention.sdpa(of, q, k, v, mask) - share @ values).abs().max() <= 1e-6
