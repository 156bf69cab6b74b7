"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): Llama with biased queries, keys and values; upper layers may have a
sliding window.

Qwen3, dense (`Qwen3ForCausalLM`): the same with normalised queries and keys, without those biases.
"""

import random

from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_types
from ptf.model.families.names import DENSE
from ptf.model.families.settings import (
    SILU,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    rope,
)


def layers(c: Config) -> tuple[Layer, ...]:
    """Return the layers of Qwen2 and Qwen3: by `layer_types`, or with a window from layer `max_window_layers` on."""
    slides = c.get("use_sliding_window", False) and c.get("sliding_window") is not None
    first = c.get("max_window_layers", 28)
    types = c.get("layer_types") or [
        "sliding_attention" if slides and i >= first else "full_attention" for i in range(c["num_hidden_layers"])
    ]
    table = rope(c)
    window = c.get("sliding_window", 4096) if slides else None
    return layers_by_type(c, types, full_attention=Layer(table), sliding_attention=Layer(table, window))


def _qwen2(c: Config) -> DecoderConfig:
    return DecoderConfig(**common(c), layers=layers(c), qkv_bias=True)


def with_window(r: random.Random, c: Settings) -> Settings:
    """Return a small config.json with random settings of the sliding window."""
    window = {"use_sliding_window": True, "sliding_window": r.choice([3, 8]), "max_window_layers": r.choice([0, 1])}
    listed = window | random_types(r, c["num_hidden_layers"])
    return c | r.choice([{"use_sliding_window": False}, listed, listed])


def _random_qwen2(r: random.Random) -> Settings:
    c = with_window(r, random_dense_config(r, "qwen2"))
    del c["head_dim"]  # Qwen2 has none of its own
    c["hidden_size"] = c["num_attention_heads"] * r.choice(
        [size for size in (8, 16, 32) if size * c["num_attention_heads"] >= 32]
    )
    return c


def _qwen3(c: Config) -> DecoderConfig:
    return DecoderConfig(**common(c), layers=layers(c), qk_norm=True, **biases(c))


def _random_qwen3(r: random.Random) -> Settings:
    return with_window(r, random_dense_config(r, "qwen3", attention_bias=r.random() < 0.3))


FAMILIES = {
    "qwen2": Family("qwen2", _qwen2, DENSE, _random_qwen2, only=SILU),
    "qwen3": Family("qwen3", _qwen3, DENSE, _random_qwen3, {"head_dim": 128}, SILU),
}
