"""Ministral 3 (`Ministral3ForCausalLM`): Mistral whose queries grow with their position beyond the length of
pre-training, as in Llama 4."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_rope
from ptf.model.families.names import DENSE
from ptf.model.families.settings import common, raise_if_unsupported, rope

DEFAULTS = {  # the reference's where a config.json has none
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
YARN = {  # the reference's default
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or YARN
    beta, original = (parameters.get(k) or 0 for k in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    without = {"llama_4_scaling_beta without original_max_position_embeddings": beta and not original}
    raise_if_unsupported(c, without, hidden_act="silu", layer_types=[])
    table = rope(c, parameters)
    if beta:
        table = replace(table, query_growth=beta, original_positions=original)
    return DecoderConfig(
        **common({**DEFAULTS, **c}),
        layers=(Layer(table, c.get("sliding_window")),) * c["num_hidden_layers"],
    )


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    parameters = random_rope(r, r.choice(["yarn", "yarn", "default"])) | {
        "original_max_position_embeddings": r.choice([8, 16, 32]),
        "llama_4_scaling_beta": r.choice([0.1, 0.5]),
    }
    return random_dense_config(
        r, "ministral3", rope_parameters=parameters, sliding_window=r.choice([None, None, 5, 16])
    )


FAMILIES = {"ministral3": Family("ministral3", config, DENSE, random_config)}
