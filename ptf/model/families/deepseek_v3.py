"""DeepSeek-V3 and R1 (`DeepseekV3ForCausalLM`) and GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`): latent attention, and
experts that are scored by a sigmoid and chosen with a bias that balances their load, beside a shared expert.

GLM-4.5 and 4.6 (`Glm4MoeForCausalLM`): grouped-query attention that rotates a part of each head, with these experts.

The layers after the last, which predict further tokens, are copied to the export unchanged.
"""

import math
import random
from dataclasses import replace

from ptf.model.checkpoint_mapping import Bits, TensorMapping, rename
from ptf.model.config import DecoderConfig, Latent, Layer, MoE
from ptf.model.families import Family
from ptf.model.families.settings import (
    ATTENTION,
    EXPERTS,
    LAYER,
    MLP,
    NORMS,
    OUTER,
    Config,
    Settings,
    biases,
    common,
    raise_if_unsupported,
    random_dense_config,
    random_rope,
    rope,
)

MIXTURES: tuple[TensorMapping, ...] = (
    *MLP,
    rename("layers.{i}.moe.router.weight", f"{LAYER}mlp.gate.weight"),
    Bits(("layers.{i}.moe.correction_bias",), f"{LAYER}mlp.gate.e_score_correction_bias"),
    *(
        rename(f"layers.{{i}}.moe.shared.{p}_proj.weight", f"{LAYER}mlp.shared_experts.{p}_proj.weight")
        for p in ("gate", "up", "down")
    ),
    *EXPERTS,
)
NAMES = {
    "q_proj": "q_proj",
    "q_a_proj": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b_proj": "kv_b_proj",
    "o_proj": "o_proj",
}
MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *NORMS,
    *MIXTURES,
    *(
        rename(f"layers.{{i}}.attn.{ours}.{w}", f"{LAYER}self_attn.{theirs}.{w}")
        for ours, theirs in NAMES.items()
        for w in ("weight", "bias")
    ),
)
CARRIED = ("model.layers.{mtp}.",)
DEFAULTS: Config = {  # the reference's where a config.json has none
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "max_position_embeddings": 4096,
}
LITE_DEFAULTS: Config = {
    **DEFAULTS,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
}
GLM_DEFAULTS: Config = {  # the reference's where a config.json has none
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


def mixture(c: Config) -> MoE:
    """Map the experts of a config.json with the keys of DeepSeek-V3.

    The reference has no load-balancing loss: its weight is 0, unless `router_aux_loss_coef` is set.
    """
    raise_if_unsupported(c, hidden_act="silu", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return MoE(
        experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        intermediate_size=c["moe_intermediate_size"],
        normalise=c["norm_topk_prob"],
        router_aux_loss_coef=c.get("router_aux_loss_coef", 0.0),
        shared_intermediate_size=c["moe_intermediate_size"] * c["n_shared_experts"],
        scores="sigmoid",
        correction=True,
        groups=c["n_group"],
        top_groups=c["topk_group"],
        scaling=c["routed_scaling_factor"],
    )


def _scale(c: Config, dim: int) -> float:
    """Return the factor of query-key products: YaRN's mscale, squared, is part of it."""
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    every, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
    mscale = 0.1 * every * math.log(factor) + 1.0 if kind != "default" and every and factor > 1 else 1.0
    return dim**-0.5 * mscale * mscale


def _latent(c: Config, sparse: list[bool]) -> DecoderConfig:
    """Map a config.json whose layers are mixtures of experts where `sparse` says so."""
    # transformers rotates `head_dim` dimensions, if that is set
    raise_if_unsupported(c, num_key_value_heads=c["num_attention_heads"], head_dim=c["qk_rope_head_dim"])
    dim, table = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], rope(c)
    return replace(
        DecoderConfig(
            **common(c),
            layers=tuple(Layer(table, moe=moe) for moe in sparse),
            **biases(c),
            latent=Latent(
                c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"], c["rope_interleave"]
            ),
            attention_scale=_scale(c, dim),
            moe=mixture(c),
        ),
        head_dim=dim,
    )


def _decoder(c: Config) -> DecoderConfig:
    return _latent(c, [i >= c["first_k_dense_replace"] for i in range(c["num_hidden_layers"])])


def _lite(c: Config) -> DecoderConfig:
    types = c.get("mlp_layer_types") or ["dense", *["sparse"] * (c["num_hidden_layers"] - 1)]
    raise_if_unsupported(c, {"mlp_layer_types": sorted(set(types) - {"dense", "sparse"})})
    return _latent(c, [kind == "sparse" for kind in types])


def random_experts(r: random.Random) -> Settings:
    """Return random settings of the experts."""
    experts, groups, top_groups, top_k = r.choice(
        [(4, 1, 1, 2), (6, 1, 1, 3), (8, 4, 2, 3), (8, 2, 1, 2), (12, 3, 2, 3)]
    )
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": top_groups,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": r.choice([16, 24]),
        "n_shared_experts": r.choice([1, 2]),
        "norm_topk_prob": r.random() < 0.6,
        "routed_scaling_factor": r.choice([1.0, 1.8, 2.5]),
        "attention_bias": r.random() < 0.4,
    }


def _random_latent(r: random.Random, model_type: str = "deepseek_v3") -> Settings:
    c = random_dense_config(
        r,
        model_type,
        q_lora_rank=r.choice([None, 16, 24]),
        kv_lora_rank=r.choice([16, 24]),
        qk_rope_head_dim=r.choice([8, 16]),
        qk_nope_head_dim=r.choice([8, 12, 16]),
        v_head_dim=r.choice([8, 12, 24]),
        rope_interleave=r.random() < 0.7,
        first_k_dense_replace=r.choice([0, 1]),
        **random_experts(r),
    )
    del c["head_dim"]
    c["num_key_value_heads"] = c["num_attention_heads"]
    yarn = {"mscale": 1.0, "mscale_all_dim": r.choice([0.7, 1.0])}
    return c | {"rope_parameters": random_rope(r, "yarn") | yarn if r.random() < 0.6 else random_rope(r, "default")}


def _random_lite(r: random.Random) -> Settings:
    c = _random_latent(r, "glm4_moe_lite")
    sparse = r.choice([["dense", "sparse"], ["sparse", "dense"], ["sparse", "sparse"]])
    del c["first_k_dense_replace"]
    return c if r.random() < 0.3 else c | {"mlp_layer_types": (2 * sparse)[: c["num_hidden_layers"]]}


def _glm(c: Config) -> DecoderConfig:
    table = rope(c, partial=0.5)
    return DecoderConfig(
        **common(c),
        layers=tuple(Layer(table, moe=i >= c["first_k_dense_replace"]) for i in range(c["num_hidden_layers"])),
        qk_norm=c.get("use_qk_norm", False),
        qkv_bias=c.get("attention_bias", False),
        moe=mixture(c),
    )


def _random_glm(r: random.Random) -> Settings:
    share = r.choice([{}, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}])
    c = random_dense_config(
        r, "glm4_moe", use_qk_norm=r.random() < 0.5, first_k_dense_replace=r.choice([0, 1]), **random_experts(r)
    )
    return c | {"rope_parameters": c["rope_parameters"] | share}


FAMILIES = {
    "deepseek_v3": Family("deepseek_v3", _decoder, MAPPINGS, _random_latent, DEFAULTS, carried=CARRIED),
    "glm4_moe_lite": Family("glm4_moe_lite", _lite, MAPPINGS, _random_lite, LITE_DEFAULTS, carried=CARRIED),
    "glm4_moe": Family(
        "glm4_moe", _glm, (*OUTER, *ATTENTION, *NORMS, *MIXTURES), _random_glm, GLM_DEFAULTS, carried=CARRIED
    ),
}
