"""Gemma 2 (`Gemma2ForCausalLM`): as Gemma 3, without norms of queries and keys, with soft-capped attention; every other
layer has a sliding window."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family, gemma3
from ptf.model.families.members import random_dense_config, random_types
from ptf.model.families.settings import common, layers_by_type, raise_if_unsupported, rope, types_of_layers

DEFAULTS = {  # the reference's, where a config.json has none
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {**DEFAULTS, **c}
    raise_if_unsupported(c, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    table, bias = rope(c), c.get("attention_bias", False)
    kinds = {"full_attention": Layer(table), "sliding_attention": Layer(table, c["sliding_window"])}
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(c, types_of_layers(c, 2), kinds),
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=c["attn_logit_softcapping"],
        activation="gelu_tanh",
        post_norm=True,
        norm_offset=True,
        embed_scale=c["hidden_size"] ** 0.5,
        softcap=c["final_logit_softcapping"],
    )


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
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


FAMILIES = {"gemma2": Family("gemma2", config, gemma3.MAPPINGS, random_config)}
