"""Qwen2-MoE and Qwen1.5-MoE (`Qwen2MoeForCausalLM`): Qwen2 whose MLPs are mixtures of experts, in all layers or some,
beside a shared expert that is scaled by a gate."""

import random
from dataclasses import replace

from ptf.model.checkpoint_mapping import Rename, TensorMapping
from ptf.model.config import DecoderConfig, Layer, MoE
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config
from ptf.model.families.names import DENSE, EXPERTS, LAYER
from ptf.model.families.settings import (
    SILU,
    Config,
    Settings,
    common,
    layers_by_type,
    rope,
    sparse_layers,
)

SHARED: tuple[TensorMapping, ...] = (
    Rename("layers.{i}.moe.router.weight", f"{LAYER}mlp.gate.weight"),
    Rename("layers.{i}.moe.shared_gate.weight", f"{LAYER}mlp.shared_expert_gate.weight"),
    *(
        Rename(f"layers.{{i}}.moe.shared.{p}_proj.weight", f"{LAYER}mlp.shared_expert.{p}_proj.weight")
        for p in ("gate", "up", "down")
    ),
)
MAPPINGS: tuple[TensorMapping, ...] = (*DENSE, *SHARED, *EXPERTS)


def _decoder(c: Config) -> DecoderConfig:
    slides = c.get("use_sliding_window", False)
    types = c.get("layer_types") or [
        "sliding_attention" if slides and not i % 2 and i < c.get("max_window_layers", 28) else "full_attention"
        for i in range(c["num_hidden_layers"])
    ]
    table = rope(c)
    window = c.get("sliding_window", 4096) if slides else None
    kinds = layers_by_type(c, types, full_attention=Layer(table), sliding_attention=Layer(table, window))
    moe = MoE(
        experts=c.get("num_experts", 60),
        top_k=c.get("num_experts_per_tok", 4),
        intermediate_size=c["moe_intermediate_size"],
        normalise=c.get("norm_topk_prob", False),
        router_aux_loss_coef=c.get("router_aux_loss_coef", 0.001),
        shared_intermediate_size=c["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return DecoderConfig(
        **common(c),
        layers=tuple(replace(kind, moe=k) for kind, k in zip(kinds, sparse_layers(c, moe.experts), strict=True)),
        qkv_bias=c.get("qkv_bias", True),
        moe=moe,
    )


def _random(r: random.Random) -> Settings:
    sparse = r.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    windows = r.choice([{}, {"use_sliding_window": True, "sliding_window": r.choice([3, 8]), "max_window_layers": 2}])
    c = random_dense_config(
        r,
        "qwen2_moe",
        num_experts=r.choice([4, 6, 8]),
        num_experts_per_tok=r.choice([1, 2, 3]),
        moe_intermediate_size=r.choice([16, 24]),
        shared_expert_intermediate_size=r.choice([16, 40]),
        norm_topk_prob=r.random() < 0.5,
        qkv_bias=r.random() < 0.7,
        router_aux_loss_coef=r.choice([0.001, 0.01]),
        **sparse,
        **windows,
    )
    kinds = ["full_attention", *(["sliding_attention"] if windows else [])]
    types = {"layer_types": [r.choice(kinds) for _ in range(c["num_hidden_layers"])]}
    return c | r.choice([{}, types])


FAMILIES = {"qwen2_moe": Family("qwen2_moe", _decoder, MAPPINGS, _random, only=SILU)}
