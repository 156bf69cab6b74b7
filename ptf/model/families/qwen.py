"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): Llama with biased queries, keys and values; upper layers may have a
sliding window.

Qwen3, dense (`Qwen3ForCausalLM`): the same with normalised queries and keys, without those biases.

Qwen2-MoE and Qwen1.5-MoE (`Qwen2MoeForCausalLM`): Qwen2 whose MLPs are mixtures of experts, in all layers or some,
beside a shared expert that is scaled by a gate.
"""

import random
from dataclasses import replace

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
    layers_by_type,
    random_dense_config,
    random_types,
    rope,
    sparse_layers,
)

SHARED: tuple[TensorMapping, ...] = (
    rename("layers.{i}.moe.router.weight", f"{LAYER}mlp.gate.weight"),
    rename("layers.{i}.moe.shared_gate.weight", f"{LAYER}mlp.shared_expert_gate.weight"),
    *(
        rename(f"layers.{{i}}.moe.shared.{p}_proj.weight", f"{LAYER}mlp.shared_expert.{p}_proj.weight")
        for p in ("gate", "up", "down")
    ),
)
MOE_MAPPINGS: tuple[TensorMapping, ...] = (*DENSE, *SHARED, *EXPERTS)


def layers(c: Config, sliding: range | None = None) -> tuple[Layer, ...]:
    """Return the layers: by `layer_types`, or with a window in those of the numbers `sliding`; by default, in Qwen2 and
    Qwen3, from `max_window_layers` on."""
    numbers, first = range(c["num_hidden_layers"]), c.get("max_window_layers", 28)
    sliding = numbers[first:] if sliding is None else sliding
    types = c.get("layer_types") or ["sliding_attention" if i in sliding else "full_attention" for i in numbers]
    table, window = rope(c), c.get("sliding_window", 4096) if c.get("use_sliding_window") else None
    return layers_by_type(c, types, full_attention=Layer(table), sliding_attention=Layer(table, window))


def _qwen2(c: Config) -> DecoderConfig:
    return DecoderConfig(**common(c), layers=layers(c), qkv_bias=True)


def with_window(r: random.Random, c: Settings) -> Settings:
    """Return a small config.json with random settings of the sliding window."""
    window = {"use_sliding_window": True, "sliding_window": r.choice([3, 8]), "max_window_layers": r.choice([0, 1])}
    listed = window | random_types(r, c["num_hidden_layers"])
    return c | r.choice([{"use_sliding_window": False}, listed, listed])


def _random_qwen2(r: random.Random) -> Settings:
    c = with_window(r, random_dense_config(r, "qwen2"))
    del c["head_dim"]  # Qwen2 has none of its own
    c["hidden_size"] = c["num_attention_heads"] * r.choice(
        [size for size in (8, 16, 32) if size * c["num_attention_heads"] >= 32]
    )
    return c


def _qwen3(c: Config) -> DecoderConfig:
    return DecoderConfig(**common(c), layers=layers(c), qk_norm=True, **biases(c))


def _random_qwen3(r: random.Random) -> Settings:
    return with_window(r, random_dense_config(r, "qwen3", attention_bias=r.random() < 0.3))


def _qwen2_moe(c: Config) -> DecoderConfig:
    kinds = layers(c, range(0, c.get("max_window_layers", 28), 2))
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


def _random_qwen2_moe(r: random.Random) -> Settings:
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


FAMILIES = {
    "qwen2": Family("qwen2", _qwen2, DENSE, _random_qwen2, only=SILU),
    "qwen3": Family("qwen3", _qwen3, DENSE, _random_qwen3, {"head_dim": 128}, SILU),
    "qwen2_moe": Family("qwen2_moe", _qwen2_moe, MOE_MAPPINGS, _random_qwen2_moe, only=SILU),
}
