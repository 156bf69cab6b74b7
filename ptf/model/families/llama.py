"""Llama 2 and 3 (`LlamaForCausalLM`): grouped-query attention, SwiGLU, pre-norm."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import DENSE
from ptf.model.families.settings import common, raise_if_unsupported, rope


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {"max_position_embeddings": 2048, **c}  # the reference's default where a config.json has none
    raise_if_unsupported(c, hidden_act="silu")
    bias = c.get("attention_bias", False)
    layers = (Layer(rope(c)),) * c["num_hidden_layers"]
    return DecoderConfig(**common(c), layers=layers, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False))


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    return random_dense_config(r, "llama", attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3)


FAMILIES = {"llama": Family("llama", config, DENSE, random_config)}
