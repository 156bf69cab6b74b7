"""Answers that begin and end at different times continue their own contexts, in every family."""

import numpy as np
import pytest
import torch

from ptf.model.decoder import Decoder
from ptf.model.families import MODULES
from ptf.rl.engines.continuous_batch import SlotCache
from tests.model.leakage import WRAPPERS
from tests.model.test_attention import model_of
from tests.rl.engines.test_kv_cache import logits, packed


@torch.no_grad()
def furthest(model: Decoder, confused: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest relative difference between the logits of new tokens with the cache and those of whole forward
    passes. Two answers begin, two more join them, one ends, and two more join."""
    rng = np.random.default_rng(0)
    cache, texts, worst = SlotCache(model.config, torch.device("cpu"), dtype), list[np.ndarray](), 0.0

    def join(lengths: list[int]) -> None:
        contexts = [rng.integers(0, model.config.vocab, n) for n in lengths]
        cache.append(lengths, max(lengths) + 9)
        batch, slots = packed(contexts), torch.arange(len(texts), len(texts) + len(contexts))
        attend = cache.prefill(batch.segments, batch.positions, slots)
        model(batch.tokens, batch.positions, batch.segments, lambda x, head: x, attend)
        texts.extend(contexts)

    def extend() -> float:
        tokens = rng.integers(0, model.config.vocab, len(texts))
        texts[:] = [np.append(text, token) for text, token in zip(texts, tokens, strict=True)]
        positions = torch.from_numpy(cache.lengths)[:, None]
        mine = model(
            torch.from_numpy(tokens)[:, None], positions, positions, lambda x, head: head.logits(x[:, 0]), cache.step()
        )
        alone = packed(texts)
        theirs = logits(model, alone)[np.cumsum(alone.lengths) - 1]
        return float((mine - theirs).abs().amax() / theirs.abs().amax())

    join([19, 3])
    worst = max(worst, extend(), extend())
    join([26, 150])
    worst = max(worst, extend())
    cache.free(0)
    if not confused:
        texts[0] = texts.pop()
    else:
        texts.pop(1)
    worst = max(worst, extend())
    join([7, 11])
    return max(worst, extend(), extend())


@pytest.mark.parametrize("model_type", [m for m in MODULES if m not in WRAPPERS])
def test_new_tokens_attend_to_their_own_context(model_type: str) -> None:
    assert furthest(model_of(model_type)) <= 1e-5


def test_the_slot_of_another_answer_gives_other_logits() -> None:
    """Negative control."""
    assert furthest(model_of("qwen3"), confused=True) > 1e-2


def test_a_cache_of_bf16_differs_by_rounding() -> None:
    assert 1e-5 < furthest(model_of("qwen3"), dtype=torch.bfloat16) < 0.05
