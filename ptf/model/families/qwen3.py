"""Qwen3, dense (`Qwen3ForCausalLM`): grouped-query attention with normalised queries and keys, SwiGLU, pre-norm."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.config import DecoderConfig
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import DENSE
from ptf.model.families.qwen2 import layers, with_window
from ptf.model.families.settings import common, raise_if_unsupported


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    raise_if_unsupported(c, hidden_act="silu")
    bias = c.get("attention_bias", False)
    shape = common({"head_dim": 128, **c})  # the reference's default where a config.json has none
    return DecoderConfig(**shape, layers=layers(c), qk_norm=True, qkv_bias=bias, out_bias=bias)


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    return with_window(r, random_dense_config(r, "qwen3", attention_bias=r.random() < 0.3))


FAMILIES = {"qwen3": Family("qwen3", config, DENSE, random_config)}
