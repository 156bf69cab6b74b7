"""OLMo 2 (`Olmo2ForCausalLM`): norms after attention and MLP and none before them; the queries of all heads are
normalised together, and the keys."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.checkpoint_mapping import Rename, TensorMapping
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import ATTENTION, LAYER, MLP, OUTER, POST_NORMS
from ptf.model.families.settings import common, raise_if_unsupported, rope

MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *ATTENTION,
    *MLP,
    *(Rename(f"layers.{{i}}.attn.{p}_width_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
    *POST_NORMS,
)


def decoder(c: Mapping[str, Any], layers: tuple[Layer, ...]) -> DecoderConfig:
    """Return what OLMo 2 and OLMo 3 share, with these layers."""
    raise_if_unsupported(c, hidden_act="silu")
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **common({"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, **c}),
        layers=layers,
        qk_width_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        pre_norm=False,
        post_norm=True,
    )


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    return decoder(c, (Layer(rope(c)),) * c["num_hidden_layers"])


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    return random_dense_config(r, "olmo2", attention_bias=r.random() < 0.3)


FAMILIES = {"olmo2": Family("olmo2", config, MAPPINGS, random_config)}
