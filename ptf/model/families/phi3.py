"""Phi-3 and Phi-4 (`Phi3ForCausalLM`): Mistral whose checkpoints hold queries, keys and values in one tensor, gates and
ups in another; part of a head may be rotated.

Left out: longrope (Phi-3 and Phi-3.5 with 128K tokens, Phi-4-mini), whose frequencies change with the length of the
document; and dropout.
"""

import random

from ptf.model.checkpoint_mapping import Concatenate, Rename, TensorMapping
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_rope
from ptf.model.families.names import LAYER, NORMS, OUTER
from ptf.model.families.settings import SILU, Config, Settings, common, raise_if_unsupported, rope

ATTN, MLP = "layers.{i}.attn.", "layers.{i}.mlp."
MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *NORMS,
    Concatenate(tuple(f"{ATTN}{p}_proj.weight" for p in "qkv"), f"{LAYER}self_attn.qkv_proj.weight"),
    Rename(f"{ATTN}o_proj.weight", f"{LAYER}self_attn.o_proj.weight"),
    Concatenate(tuple(f"{MLP}{p}_proj.weight" for p in ("gate", "up")), f"{LAYER}mlp.gate_up_proj.weight"),
    Rename(f"{MLP}down_proj.weight", f"{LAYER}mlp.down_proj.weight"),
)


def _decoder(c: Config) -> DecoderConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"  # Phi-3 calls longrope su and yarn, too
    raise_if_unsupported(c, {"rope_type": kind != "default" and kind})
    layer = Layer(rope(c, parameters, partial=1.0), c.get("sliding_window"))
    return DecoderConfig(**common(c), layers=(layer,) * c["num_hidden_layers"])


def _random(r: random.Random) -> Settings:
    partial = r.choice([{}, {"partial_rotary_factor": r.choice([0.5, 0.75])}])
    return random_dense_config(
        r,
        "phi3",
        pad_token_id=0,  # the default is outside this vocabulary
        sliding_window=r.choice([None, 5, 16]),
        rope_parameters=random_rope(r, "default") | partial,
    )


DEFAULTS: Config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
FAMILIES = {"phi3": Family("phi3", _decoder, MAPPINGS, _random, DEFAULTS, SILU)}
