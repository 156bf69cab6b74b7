"""Answers that go on from contexts read once say, in every family, what each says with its own context before it."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES
from ptf.rl.engines.kv_cache import Cache
from tests.model.leakage import WRAPPERS
from tests.model.test_attention import model_of

NEW = 7


def packed(rows: list[np.ndarray]) -> Batch:
    return Batch.of(
        [[(Document(tokens.astype(np.int32), np.ones(len(tokens), np.float32)),) for tokens in rows]],
        sum(map(len, rows)),
    )


def logits(model: Decoder, batch: Batch) -> torch.Tensor:
    return model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.logits(x))[0]


@torch.no_grad()
def furthest(model: Decoder, swapped: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference between the logits of new tokens with the cache and those of a whole forward
    pass. The answers end at different times."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, model.config.vocab, n) for n in (19, 3, 26, 11)]
    which = np.array([2, 0, 0, 3, 0, 1, 0, 0, 2])
    tokens = rng.integers(0, model.config.vocab, (len(which), NEW))
    ends = np.array([7, 2, 7, 1, 5, 3, 3, 7, 4])
    cache = Cache(model.config, [len(context) for context in contexts], NEW, torch.device("cpu"), dtype)
    batch = packed(contexts)
    model(
        batch.tokens, batch.positions, batch.segments, lambda x, head: x, cache.prefill(batch.segments, batch.positions)
    )
    cache.map_contexts(torch.from_numpy(which))
    live, apart = np.arange(len(which)), 0.0
    for turn in range(NEW):
        if not (going := ends[live] > turn).all():
            cache.keep(torch.from_numpy(np.flatnonzero(going)))
            live = live[going]
        if swapped:
            cache.index, cache.owner = cache.index.flip(0), cache.owner.flip(0)
        new = torch.from_numpy(tokens[live, turn])[:, None]
        positions = torch.tensor([[len(contexts[which[i]]) + turn] for i in live])
        mine = model(new, positions, positions, lambda x, head: head.logits(x[:, 0]), cache.step(turn))
        alone = packed([np.concatenate([contexts[which[i]], tokens[i, : turn + 1]]) for i in live])
        theirs = logits(model, alone)[np.cumsum(alone.lengths) - 1]
        apart = max(apart, float((mine - theirs).abs().amax() / theirs.abs().amax()))
    assert live.tolist() == [0, 2, 7]
    assert set(cache.lengths.tolist()) == {26, 19}, "contexts that nobody goes on from are let go"
    return apart


@pytest.mark.parametrize("model_type", [m for m in MODULES if m not in WRAPPERS])
def test_new_tokens_see_their_own_context(model_type: str) -> None:
    assert furthest(model_of(model_type)) <= 1e-5


def test_that_of_another_is_seen() -> None:
    """Negative control: the cache of another sequence gives other logits."""
    assert furthest(model_of("qwen3"), swapped=True) > 1e-2


def test_a_cache_of_bf16_rounds_what_it_keeps_and_no_more() -> None:
    """Logits are nearer to those of fp32 than those of a model of bf16 are."""
    model = model_of("qwen3")
    kept = furthest(model, dtype=torch.bfloat16)
    assert 1e-5 < kept < 0.5 * furthest_of_bf16(model)


@torch.no_grad()
def furthest_of_bf16(model: Decoder) -> float:
    rng = np.random.default_rng(0)
    batch = packed([rng.integers(0, model.config.vocab, n) for n in (26, 33, 19)])
    exact = logits(model, batch)
    rounded = logits(copy.deepcopy(model).to(torch.bfloat16), batch).float()
    return float((rounded - exact).abs().amax() / exact.abs().amax())


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_however_answers_are_spread_little_more_is_computed(counts: list[int], random) -> None:
    which = [context for context, count in enumerate(counts) for _ in range(count)]
    random.shuffle(which)
    cache = Cache(model_of("qwen3").config, [2] * len(counts), 1, torch.device("cpu"), torch.float32)
    cache.stored[0] += torch.arange(len(counts))[:, None, None, None]  # each is known by its number
    cache.map_contexts(torch.tensor(which))
    if len(set(counts)) == 1:
        assert len(cache.lengths) == len(counts), "groups of one size need no copy"
        assert len(cache.lengths) * cache.width == len(which)
    live = list(which)
    while True:
        assert cache.index.unique().numel() == len(live), "each has a place of its own"
        assert cache.stored[0][0, cache.owner, 0, 0, 0].tolist() == live
        assert len(cache.lengths) * cache.width <= 3 * len(live)
        if len(live) == 1:
            break
        kept = sorted(random.sample(range(len(live)), random.randint(1, len(live) - 1)))
        cache.keep(torch.tensor(kept))
        live = [live[i] for i in kept]
