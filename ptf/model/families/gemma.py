"""Gemma 3 (`Gemma3ForCausalLM`, and the text part of `Gemma3ForConditionalGeneration`): norms before
and after attention and MLP, norms that scale by 1 + weight, scaled embeddings; five sliding-window layers (RoPE θ
10,000) for every full-attention layer (θ 1,000,000).

Gemma 2 (`Gemma2ForCausalLM`): the same without norms of queries and keys, with soft-capped attention; every other layer
has a sliding window.

A multimodal checkpoint trains its language model; the vision tensors are copied to the export unchanged.
"""

import random

from ptf.model.checkpoint_mapping import TensorMapping, rename
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.settings import (
    ATTENTION,
    LAYER,
    MLP,
    OUTER,
    POST_NORMS,
    WRAPPER,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    raise_if_unsupported,
    random_dense_config,
    random_rope,
    random_types,
    random_wrapper,
    rope,
    text_part,
    types_of_layers,
)

MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *ATTENTION,
    *MLP,
    rename("layers.{i}.attn_norm.weight", f"{LAYER}input_layernorm.weight"),
    rename("layers.{i}.mlp_norm.weight", f"{LAYER}pre_feedforward_layernorm.weight"),
    *POST_NORMS,
)
DEFAULTS = {  # the reference's defaults where a config.json has none, as the published multimodal ones
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _decoder(c: Config) -> DecoderConfig:
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    by_type = c.get("rope_parameters") or {}
    table = rope(c, by_type.get("full_attention") or c.get("rope_scaling") or {}, 1_000_000.0)
    local = rope({**c, "rope_theta": c.get("rope_local_base_freq")}, by_type.get("sliding_attention") or {}, 10_000.0)
    window = Layer(local, c["sliding_window"])
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(c, types_of_layers(c, pattern), full_attention=Layer(table), sliding_attention=window),
        qk_norm=True,
        **biases(c),
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        activation="gelu_tanh",
        post_norm=True,
        norm_offset=True,
        embed_scale=c["hidden_size"] ** 0.5,
        softcap=c.get("final_logit_softcapping"),
    )


def _multimodal(c: Config) -> DecoderConfig:
    text = {**text_part(c, tied=True), "model_type": "gemma3"}
    # the reference ignores this setting in multimodal models
    raise_if_unsupported(c, {"text_config.final_logit_softcapping": text.get("final_logit_softcapping")})
    return TEXT.config(text)


def _random(r: random.Random) -> Settings:
    c = random_dense_config(
        r,
        "gemma3_text",
        sliding_window=r.choice([3, 8, 20]),
        sliding_window_pattern=r.choice([2, 3]),
        query_pre_attn_scalar=r.choice([8, 16, 50]),
        attention_bias=r.random() < 0.2,
        final_logit_softcapping=r.choice([None, 20.0]),
    )
    c |= random_types(r, c["num_hidden_layers"])
    full = random_rope(r, r.choice(["default", "linear"]))
    return c | {"rope_parameters": {"full_attention": full, "sliding_attention": random_rope(r, "default")}}


def _random_multimodal(r: random.Random) -> Settings:
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    text = _random(r) | {"final_logit_softcapping": None}
    return random_wrapper("gemma3", text, vision) | {"mm_tokens_per_image": 4}


GEMMA2_DEFAULTS = {  # the reference's, where a config.json has none
    **DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def _gemma2(c: Config) -> DecoderConfig:
    table, types = rope(c), types_of_layers(c, 2)
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(
            c, types, full_attention=Layer(table), sliding_attention=Layer(table, c["sliding_window"])
        ),
        **biases(c),
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=c["attn_logit_softcapping"],
        activation="gelu_tanh",
        post_norm=True,
        norm_offset=True,
        embed_scale=c["hidden_size"] ** 0.5,
        softcap=c["final_logit_softcapping"],
    )


def _random_gemma2(r: random.Random) -> Settings:
    c = random_dense_config(
        r,
        "gemma2",
        sliding_window=r.choice([3, 8, 20]),
        query_pre_attn_scalar=r.choice([8, 16, 50]),
        attention_bias=r.random() < 0.2,
        final_logit_softcapping=r.choice([None, 20.0]),
        attn_logit_softcapping=r.choice([None, 2.0, 5.0, 5.0]),
    )
    return c | random_types(r, c["num_hidden_layers"])


ONLY: Config = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
TEXT = Family("gemma3_text", _decoder, MAPPINGS, _random, DEFAULTS, ONLY | {"attn_logit_softcapping": 0})
FAMILIES = {
    "gemma3_text": TEXT,
    "gemma3": Family("gemma3", _multimodal, MAPPINGS, _random_multimodal, **WRAPPER),
    "gemma2": Family("gemma2", _gemma2, MAPPINGS, _random_gemma2, GEMMA2_DEFAULTS, ONLY),
}
