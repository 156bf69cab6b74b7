"""Llama 2 and 3 (`LlamaForCausalLM`): grouped-query attention, SwiGLU, pre-norm.

Granite 3 (`GraniteForCausalLM`): Llama with factors of the embeddings, of what attention and MLP add to the residual
stream, of query-key products, and of the logits.

Seed-OSS (`SeedOssForCausalLM`): Llama with biased queries, keys and values. Its dropout is not used in training.

SmolLM3 (`SmolLM3ForCausalLM`): Llama in which every fourth layer has no rotary positions (NoPE); those layers may have
a sliding window.
"""

import random
from dataclasses import replace

from ptf.errors import UserError
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.settings import (
    DENSE,
    SILU,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    random_dense_config,
    random_types,
    rope,
)


def _llama(c: Config) -> DecoderConfig:
    return DecoderConfig(
        **common(c),
        **biases(c),
        layers=(Layer(rope(c)),) * c["num_hidden_layers"],
        mlp_bias=c.get("mlp_bias", False),
    )


def _random_llama(r: random.Random) -> Settings:
    return random_dense_config(r, "llama", attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3)


def _granite(c: Config) -> DecoderConfig:
    return replace(
        _llama(c),
        embed_scale=float(c.get("embedding_multiplier", 1.0)),
        residual_scale=float(c.get("residual_multiplier", 1.0)),
        attention_scale=float(c.get("attention_multiplier", 1.0)),
        logit_scale=1.0 / c.get("logits_scaling", 1.0),
    )


def _random_granite(r: random.Random) -> Settings:
    return random_dense_config(
        r,
        "granite",
        attention_bias=r.random() < 0.3,
        mlp_bias=r.random() < 0.3,
        embedding_multiplier=r.choice([1.0, 12.0]),
        residual_multiplier=r.choice([0.22, 0.5]),
        attention_multiplier=r.choice([0.0625, 0.3]),
        logits_scaling=r.choice([1.0, 6.0, 8.0]),
    )


def _seed_oss(c: Config) -> DecoderConfig:
    return replace(_llama(c), qkv_bias=c.get("attention_bias", True), out_bias=c.get("attention_out_bias", False))


def _random_seed_oss(r: random.Random) -> Settings:
    bias = {} if r.random() < 0.5 else {"attention_bias": r.random() < 0.5}
    return random_dense_config(
        r,
        "seed_oss",
        attention_out_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.3,
        attention_dropout=0.0,
        residual_dropout=0.0,
        **bias,
    )


def _smollm3(c: Config) -> DecoderConfig:
    count, every = c["num_hidden_layers"], c.get("no_rope_layer_interval", 4)
    rotates = c.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1: it has positions
    if len(rotates) < count:
        raise UserError(f"smollm3: config.json has num_hidden_layers {count} and {len(rotates)} no_rope_layers")
    types = c.get("layer_types") or ["full_attention" if rotates[i] else "sliding_attention" for i in range(count)]
    table, window = rope(c, theta=2_000_000.0), c.get("sliding_window") if c.get("use_sliding_window") else None
    layers = layers_by_type(c, types, full_attention=Layer(table), sliding_attention=Layer(table, window))
    return DecoderConfig(
        **common(c),
        layers=tuple(
            kind if rotated else replace(kind, rope=replace(table, partial=0.0))
            for kind, rotated in zip(layers, rotates, strict=False)
        ),
        **biases(c),
        mlp_bias=c.get("mlp_bias", False),
    )


def _random_smollm3(r: random.Random) -> Settings:
    c = random_dense_config(
        r,
        "smollm3",
        pad_token_id=0,  # the default is outside this vocabulary
        attention_bias=r.random() < 0.3,
        mlp_bias=r.random() < 0.3,
        **r.choice([{}, {"use_sliding_window": True, "sliding_window": r.choice([3, 8])}]),
    )
    listed = [r.choice([0, 1]) for _ in range(c["num_hidden_layers"])]
    if "sliding_window" in c:
        c |= random_types(r, c["num_hidden_layers"])
    return c | r.choice([{"no_rope_layer_interval": r.choice([2, 3])}, {"no_rope_layers": listed}])


DEFAULTS: Config = {"max_position_embeddings": 2048}
FAMILIES = {
    "llama": Family("llama", _llama, DENSE, _random_llama, DEFAULTS, SILU),
    "granite": Family("granite", _granite, DENSE, _random_granite, DEFAULTS, SILU),
    "seed_oss": Family(
        "seed_oss",
        _seed_oss,
        DENSE,
        _random_seed_oss,
        {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288},
        SILU,
    ),
    "smollm3": Family(
        "smollm3", _smollm3, DENSE, _random_smollm3, {"num_key_value_heads": 4, "tie_word_embeddings": True}, SILU
    ),
}
