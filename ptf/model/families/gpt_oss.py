"""GPT-OSS (`GptOssForCausalLM`): attention sinks, every other layer with a sliding window, biases everywhere, YaRN, and
clamped SwiGLU experts weighted by the softmax over the chosen ones.

Published checkpoints hold the experts in MXFP4; they are dequantised as they are read.
"""

import random

from ptf.model.checkpoint_mapping import Interleave, TensorMapping, Transpose, rename
from ptf.model.config import DecoderConfig, Layer, MoE
from ptf.model.families import Family
from ptf.model.families.settings import (
    ATTENTION,
    LAYER,
    NORMS,
    OUTER,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    random_dense_config,
    random_rope,
    random_types,
    rope,
    types_of_layers,
)

OURS = "layers.{i}.moe.experts."
MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *ATTENTION,
    *NORMS,
    rename("layers.{i}.attn.sinks", f"{LAYER}self_attn.sinks"),
    *(rename(f"layers.{{i}}.moe.router.{w}", f"{LAYER}mlp.router.{w}") for w in ("weight", "bias")),
    Interleave((f"{OURS}gate_proj", f"{OURS}up_proj"), f"{LAYER}mlp.experts.gate_up_proj", transposed=True),
    Interleave((f"{OURS}gate_bias", f"{OURS}up_bias"), f"{LAYER}mlp.experts.gate_up_proj_bias", transposed=False),
    Transpose((f"{OURS}down_proj",), f"{LAYER}mlp.experts.down_proj"),
    rename(f"{OURS}down_bias", f"{LAYER}mlp.experts.down_proj_bias"),
)
DEFAULTS = {  # the reference's where a config.json has none
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _decoder(c: Config) -> DecoderConfig:
    table = rope(c, c.get("rope_parameters") or c.get("rope_scaling") or YARN, 150_000.0)
    full, window = Layer(table, moe=True), Layer(table, c["sliding_window"], moe=True)
    moe = MoE(
        experts=c.get("num_local_experts", c.get("num_experts", 128)),
        top_k=c.get("num_experts_per_tok", c.get("experts_per_token", 4)),
        intermediate_size=c["intermediate_size"],
        bias=True,
        clamp=c.get("swiglu_limit", 7.0),
        router_aux_loss_coef=c.get("router_aux_loss_coef", 0.001),
    )
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(c, types_of_layers(c, 2), full_attention=full, sliding_attention=window),
        **biases(c, True),
        sinks=True,
        moe=moe,
    )


def _random(r: random.Random) -> Settings:
    c = random_dense_config(
        r,
        "gpt_oss",
        num_local_experts=r.choice([4, 5, 8]),
        num_experts_per_tok=r.choice([1, 2, 4]),
        sliding_window=r.choice([2, 5, 16]),
        attention_bias=r.random() < 0.8,
        router_aux_loss_coef=r.choice([0.001, 0.01, 0.9]),
        rope_parameters=random_rope(r, "yarn") | {"truncate": r.random() < 0.5},
    )
    return c | random_types(r, c["num_hidden_layers"])


FAMILIES = {"gpt_oss": Family("gpt_oss", _decoder, MAPPINGS, _random, DEFAULTS)}
