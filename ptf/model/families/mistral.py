"""Mistral (`MistralForCausalLM`): Llama in which every layer may have a sliding window."""

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
    c = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, **c}  # the reference's defaults
    raise_if_unsupported(c, hidden_act="silu", layer_types=[])
    layers = (Layer(rope(c), c.get("sliding_window", 4096)),) * c["num_hidden_layers"]
    return DecoderConfig(**common(c), layers=layers)


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    return random_dense_config(r, "mistral", sliding_window=r.choice([None, 1, 5, 16]))


FAMILIES = {"mistral": Family("mistral", config, DENSE, random_config)}
