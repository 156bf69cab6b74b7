"""Granite 3 (`GraniteForCausalLM`): Llama with factors of the embeddings, of what attention and MLP add to the residual
stream, of query-key products, and of the logits."""

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
    return replace(
        llama.config(c),
        embed_scale=float(c.get("embedding_multiplier", 1.0)),
        residual_scale=float(c.get("residual_multiplier", 1.0)),
        attention_scale=float(c.get("attention_multiplier", 1.0)),
        logit_scale=1.0 / c.get("logits_scaling", 1.0),
    )


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
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


FAMILIES = {"granite": Family("granite", config, DENSE, random_config)}
