"""Seed-OSS (`SeedOssForCausalLM`): Llama with biased queries, keys and values. Its dropout is not used in training."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.model.config import DecoderConfig
from ptf.model.families import Family, llama
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import DENSE


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288, **c}  # the reference's defaults
    return replace(llama.config(c), qkv_bias=c.get("attention_bias", True), out_bias=c.get("attention_out_bias", False))


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
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


FAMILIES = {"seed_oss": Family("seed_oss", config, DENSE, random_config)}
