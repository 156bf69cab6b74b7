"""Documents of one packed sequence never see each other: in no family, under no packing, on no path."""

import random
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.kernels import attention
from ptf.model.kernels.attention import Flex, PerDocument, band, bucket
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.layers import LayerFactory
from ptf.model.reference import random_reference
from tests.model import leakage
from tests.model.leakage import MIXERS, WRAPPERS, Mixer, batch_of, lengths, look, moved, with_ties
from tests.tiny import packed

WIDTH = 48


@cache
def model_of(model_type: str) -> Decoder:
    return model_from(config_of(model_type))


def config_of(model_type: str) -> dict[str, Any]:
    return family_of({"model_type": model_type}).random_config(random.Random(f"attention/{model_type}"))


def model_from(config: dict[str, Any], kernels: Kernels = PLAIN) -> Decoder:
    """A decoder with the random weights of a config.json."""
    with tempfile.TemporaryDirectory() as directory:
        random_reference(config, 0).save_pretrained(directory)
        return bridge.load(Path(directory), factory=LayerFactory(kernels=kernels))


def test_every_family_is_looked_at() -> None:
    looked_at = {mixer.model_type for mixer in MIXERS if mixer.backend is not None}
    assert MODULES.keys() - set(WRAPPERS) <= looked_at


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "mixer", [m for m in MIXERS if m.model_type != "mamba"], ids=lambda m: f"{m.model_type}, {m.path}"
)
def test_a_document_is_what_it_is_alone(mixer: Mixer) -> None:
    """A handful of what benchmarks/leakage.py does in full; nothing crosses,
    and every fault is seen in every sequence that can show it."""
    rng = np.random.default_rng(0)
    found = look(mixer, batch_of(lengths(rng, 12), rng), rng)
    assert found.crossing.max() == 0
    assert found.apart.max() <= mixer.bound
    assert moved(mixer, batch_of(lengths(rng, 12), rng), rng).max() == 0
    for name, fault in mixer.crossing_faults.items():
        sequences = [each for each in lengths(rng, 12) if len(each) > 1]
        assert bool((moved(mixer, batch_of(sequences, rng), rng, fault) > 0).all()), name
    for name, fault in mixer.faults.items():
        sequences = [each for each in lengths(rng, 12) if len(each) > 1]
        found = look(mixer, batch_of(sequences, rng), rng, fault)
        assert bool(((found.crossing > 0) | (found.apart > mixer.bound)).all()), name


def test_documents_with_a_tie_are_those_of_a_token_with_a_tie() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 3, 3, 3, 3]])
    clear = torch.ones(12)
    first, groups, padding = clear.clone(), torch.ones(12, 2), clear.clone()
    first[1], groups[9, 1], padding[5] = 1e-7, 1e-7, 0
    assert not with_ties(segments, [clear, padding]).any()
    assert with_ties(segments, [clear, first]).tolist() == (segments == 0).tolist()
    assert with_ties(segments, [first, groups]).tolist() == ((segments == 0) | (segments == 3)).tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_the_masks_of_a_gpu_see_what_a_cpu_sees(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, not compiled (torch has no backward for it on a CPU), in layers with and without window,
    with and without sinks."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)
    batch = packed([[10, 20, 18], [30, 1]], WIDTH)
    raise_if_masks_differ(model_of(model_type), batch.tokens, batch.positions, batch.segments)


@torch.no_grad()
def raise_if_masks_differ(model: Any, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> None:
    """Compare the logits with both ways of attention."""
    inputs = tokens % model.config.vocab, positions, segments, lambda x, head: head.logits(x)
    one, other = (model(*inputs, kind(segments, positions)) for kind in (PerDocument, Flex))
    assert (one - other)[segments >= 0].abs().max() <= 1e-5 * one.abs().max()


@given(st.integers(1, 1 << 20))
def test_a_bucket_wastes_a_quarter_at_most(size: int) -> None:
    assert size <= bucket(size) <= 1.25 * size
    assert bucket(bucket(size)) == bucket(size)
    assert len({bucket(n) for n in range(size, min(2 * size, size + 5000) + 1)}) <= 8


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("rows", "length"), [(9, 130), (1, 128), (3, 700)])
def test_padding_to_a_bucket_changes_no_token(rows: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def seen(q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float) -> tuple[Tensor, Tensor]:
        shapes.append(q.shape)
        return attention._flex(q, k, v, mask, scale)

    monkeypatch.setattr(attention, "_compiled_flex", lambda: seen)
    layer = model_of("gpt_oss").layers[0].attn
    heads, g = model_of("gpt_oss").config, torch.Generator().manual_seed(rows)
    batch = packed([[length // 2, length - length // 2] for _ in range(rows)], length)
    q, k, v = (torch.randn(rows, length, n, heads.head_dim, generator=g) for n in (heads.heads, *[heads.kv_heads] * 2))
    with torch.no_grad():
        mine, theirs = (kind(batch.segments, batch.positions)(layer, q, k, v) for kind in (Flex, PerDocument))
    assert mine.shape == theirs.shape == q.shape
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert [(s[0], s[2]) for s in shapes] == [(bucket(rows), 128 * bucket(-(-length // 128)))]


def test_any_other_error_of_flex_attention_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: object) -> Tensor:
        raise ValueError("of the kernel")

    monkeypatch.setattr(attention, "_compiled_flex", lambda: failing)
    layer, heads = model_of("llama").layers[0].attn, model_of("llama").config
    batch = packed([[8]], 8)
    q, k, v = (torch.randn(1, 8, n, heads.head_dim) for n in (heads.heads, *[heads.kv_heads] * 2))
    with pytest.raises(ValueError, match="of the kernel"):
        Flex(batch.segments, batch.positions)(layer, q, k, v)


def test_more_variants_than_the_limit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the unfused attention, which torch would run without a word."""
    torch._dynamo.reset()
    attention._compiled_flex.cache_clear()
    monkeypatch.setattr(attention, "FLEX_VARIANTS", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layer, heads = model_of("llama").layers[0].attn, model_of("llama").config

    def attend(length: int) -> Tensor:
        batch = packed([[length]], length)
        q, k, v = (torch.randn(1, length, n, heads.head_dim) for n in (heads.heads, *[heads.kv_heads] * 2))
        with torch.no_grad():
            return Flex(batch.segments, batch.positions)(layer, q, k, v)

    try:
        for length in (5, 100, 128, 250):  # two buckets
            assert attend(length).shape[1] == length
        with pytest.raises(RuntimeError, match=r"more than 2 variants; the last has q of shape \[1, \d+, 384, \d+\]"):
            attend(257)
    finally:
        attention._compiled_flex.cache_clear()
        torch._dynamo.reset()


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
    layer = model.layers[0].attn
    heads, size = model.config.heads, model.config.head_dim
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 9, size, generator=g) for n in (heads, model.config.kv_heads, model.config.kv_heads))
    seen = torch.ones(9, 9).tril().bool()
    keys, values = (t.repeat_interleave(heads // model.config.kv_heads, 1) for t in (k, v))
    logits = (q @ keys.transpose(-2, -1) * layer.scale).masked_fill(~seen, -torch.inf)
    share = torch.cat((logits, layer.sinks[None, :, None, None].expand(1, heads, 9, 1)), -1).softmax(-1)[..., :-1]
    for mask in (None, seen):
        assert (attention.sdpa(layer, q, k, v, mask) - share @ values).abs().max() <= 1e-6


def test_settings_of_a_mixer_may_be_lists() -> None:
    def mixer(*types: str) -> Mixer:
        kinds = [f"{kind}_attention" for kind in types]
        return Mixer("windows", "gemma2", PerDocument, settings=(("num_hidden_layers", 2), ("layer_types", kinds)))

    one, other = leakage.model_of(mixer("full", "sliding")), leakage.model_of(mixer("sliding", "full"))
    assert [layer.window is None for layer in one.config.layers] == [True, False]
    assert [layer.window is None for layer in other.config.layers] == [False, True]
    assert leakage.model_of(mixer("full", "sliding")) is one


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("model_type", dict.fromkeys(m.model_type for m in MIXERS if m.backend is PerDocument))
def test_a_document_of_nan_changes_no_bit_of_another(model_type: str, poison: float) -> None:
    model = model_of(model_type)
    batch = packed([[9, 5, 12], [7, 20], [3, 30]], 40)
    batch = replace(batch, tokens=batch.tokens % 61)
    bad = batch.segments == 1
    others = (batch.segments >= 0) & ~bad

    def outputs(poisoned: bool) -> Tensor:
        hook = model.embed.register_forward_hook(
            lambda module, args, out: torch.where(bad[..., None], poison, out) if poisoned else out
        )
        try:
            with torch.no_grad():
                return model(batch.tokens, batch.positions, batch.segments, lambda x, head: x)[others]
        finally:
            hook.remove()

    assert torch.equal(outputs(False), outputs(True))
