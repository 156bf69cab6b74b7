"""GLM-4.5 and 4.6 (`Glm4MoeForCausalLM`): grouped-query attention that rotates a part of each head, with the experts of
DeepSeek-V3.

The layers after the last, which predict further tokens, are copied to the export unchanged.
"""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.checkpoint_mapping import TensorMapping
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.deepseek_v3 import CARRIED, MIXTURES, mixture, random_experts
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import ATTENTION, NORMS, OUTER
from ptf.model.families.settings import common, rope

MAPPINGS: tuple[TensorMapping, ...] = (*OUTER, *ATTENTION, *NORMS, *MIXTURES)
DEFAULTS: Mapping[str, Any] = {  # the reference's where a config.json has none
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {**DEFAULTS, **c}
    table = rope(c, partial=0.5)
    return DecoderConfig(
        **common(c),
        layers=tuple(Layer(table, moe=i >= c["first_k_dense_replace"]) for i in range(c["num_hidden_layers"])),
        qk_norm=c.get("use_qk_norm", False),
        qkv_bias=c.get("attention_bias", False),
        moe=mixture(c),
    )


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    share = r.choice([{}, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}])
    c = random_dense_config(
        r, "glm4_moe", use_qk_norm=r.random() < 0.5, first_k_dense_replace=r.choice([0, 1]), **random_experts(r)
    )
    return c | {"rope_parameters": c["rope_parameters"] | share}


FAMILIES = {"glm4_moe": Family("glm4_moe", config, MAPPINGS, random_config, carried=CARRIED)}
