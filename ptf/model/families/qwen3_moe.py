"""Qwen3-MoE (`Qwen3MoeForCausalLM`): Qwen3 whose MLPs are mixtures of experts, in all layers or some."""

import random

from ptf.model.checkpoint_mapping import TensorMapping, rename
from ptf.model.config import DecoderConfig, Layer, MoE
from ptf.model.families import Family
from ptf.model.families.settings import (
    DENSE,
    EXPERTS,
    LAYER,
    SILU,
    Config,
    Settings,
    biases,
    common,
    random_dense_config,
    rope,
    sparse_layers,
)

MAPPINGS: tuple[TensorMapping, ...] = (
    *DENSE,
    rename("layers.{i}.moe.router.weight", f"{LAYER}mlp.gate.weight"),
    *EXPERTS,
)


def _decoder(c: Config) -> DecoderConfig:
    table, window = rope(c), c.get("sliding_window", 4096) if c.get("use_sliding_window") else None
    experts = c.get("num_experts", c.get("num_local_experts", 128))
    layers = tuple(Layer(table, window, moe) for moe in sparse_layers(c, experts))
    moe = MoE(
        experts=experts,
        top_k=c["num_experts_per_tok"],
        intermediate_size=c["moe_intermediate_size"],
        normalise=c.get("norm_topk_prob", False),
        router_aux_loss_coef=c.get("router_aux_loss_coef", 0.001),
    )
    return DecoderConfig(**common(c), layers=layers, qk_norm=True, **biases(c), moe=moe)


def _random(r: random.Random) -> Settings:
    experts = r.choice([4, 6, 8])
    sparse = r.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    return random_dense_config(
        r,
        "qwen3_moe",
        num_experts=experts,
        num_experts_per_tok=r.choice([1, 2, 3]),
        moe_intermediate_size=r.choice([16, 24]),
        norm_topk_prob=r.random() < 0.6,
        attention_bias=r.random() < 0.3,
        router_aux_loss_coef=r.choice([0.001, 0.01]),
        **r.choice([{}, {"use_sliding_window": True, "sliding_window": r.choice([3, 8])}]),
        **sparse,
    )


DEFAULTS: Config = {"num_key_value_heads": 4}  # the reference's where a config.json has none
FAMILIES = {"qwen3_moe": Family("qwen3_moe", _decoder, MAPPINGS, _random, DEFAULTS, SILU)}
