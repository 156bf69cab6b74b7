"""Qwen3.5 (`Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`, and the text parts of their multimodal models): three layers
of linear attention by the gated delta rule for every layer of softmax attention, whose output has a gate and whose
heads are rotated in part; norms that scale by 1 + weight; an MLP, or experts beside a shared one, in every layer.

Qwen3-Next (`Qwen3NextForCausalLM`): the same whose projections of linear attention lie in two matrices, with rows that
are grouped by key head; experts beside a shared one, in all layers or some.

A multimodal checkpoint trains its language model, on text alone: then the three coordinates of a position are equal,
and its interleaved rotation is the plain one. The vision tower, and the layers that predict several tokens (`mtp.`),
are copied to the export unchanged.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Concatenate, TensorMapping, rename
from ptf.model.config import DecoderConfig, GatedDelta, Layer, MoE
from ptf.model.families import Family
from ptf.model.families.qwen import SHARED
from ptf.model.families.settings import (
    DENSE,
    EXPERTS,
    LAYER,
    Config,
    Settings,
    biases,
    common,
    inside,
    layers_by_type,
    random_dense_config,
    random_wrapper,
    rope,
    sparse_layers,
    text_part,
    types_of_layers,
)

LINEAR_ATTENTION: tuple[TensorMapping, ...] = (
    *(
        rename(f"layers.{{i}}.attn.{ours}", f"{LAYER}linear_attn.{theirs}")
        for ours, theirs in (
            ("conv.weight", "conv1d.weight"),
            ("a_log", "A_log"),
            ("dt_bias", "dt_bias"),
            ("norm.weight", "norm.weight"),
            ("out_proj.weight", "out_proj.weight"),
        )
    ),
    *(
        rename(f"layers.{{i}}.attn.{p}_proj.weight", f"{LAYER}linear_attn.in_proj_{p}.weight")
        for p in ("qkv", "z", "b", "a", "qkvz", "ba")
    ),
)
MAPPINGS: tuple[TensorMapping, ...] = (*DENSE, *LINEAR_ATTENTION)
DEFAULTS = {  # the reference's defaults where a config.json has none
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS: Config = {
    **DEFAULTS,
    "intermediate_size": 0,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
NEXT_DEFAULTS: Config = {
    **MOE_DEFAULTS,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def gated_delta(c: Config, *, fused: bool) -> GatedDelta:
    """Return the sizes of linear attention. Raise UserError for heads of values that are no multiple of the keys'."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if values % keys:
        raise UserError(f"{c['model_type']}: linear_num_value_heads {values} is no multiple of {keys} key heads")
    sizes = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
    return GatedDelta(keys, values, *sizes, fused=fused)


def _hybrid(c: Config, *, fused: bool, moe: MoE | None = None) -> DecoderConfig:
    """Map a config.json with linear attention; experts, if there are any, are in every layer."""
    # a quarter of a head's dimensions is rotated, where a config.json does not say
    full = Layer(rope(c, partial=0.25), moe=moe is not None)
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(
            c,
            types_of_layers(c, c.get("full_attention_interval") or 4, "linear_attention"),
            full_attention=full,
            linear_attention=replace(full, delta=True),
        ),
        qk_norm=True,
        **biases(c),
        norm_offset=True,
        attention_gate=True,
        delta=gated_delta(c, fused=fused),
        moe=moe,
    )


def _decoder(c: Config) -> DecoderConfig:
    return _hybrid(c, fused=False)


def _experts(c: Config, normalise: bool = True) -> MoE:
    return MoE(
        experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        intermediate_size=c["moe_intermediate_size"],
        normalise=normalise,
        router_aux_loss_coef=c["router_aux_loss_coef"],
        shared_intermediate_size=c["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def _moe(c: Config) -> DecoderConfig:
    return _hybrid(c, fused=False, moe=_experts(c))


def multimodal(text: Family) -> Callable[[Config], DecoderConfig]:
    """Return the mapping of a multimodal config.json, whose text part is of a family."""
    return lambda c: text.config(text_part(c))


def _small_hybrid(r: random.Random, model_type: str, **more: Any) -> Settings:
    sizes = {"hidden_size": r.choice([96, 144]), "num_hidden_layers": r.choice([2, 3]), "head_dim": r.choice([16, 32])}
    c = random_dense_config(r, model_type, attention_bias=r.random() < 0.2, **sizes, **more)
    keys = r.choice([1, 2, 3])
    kinds = [r.choice(["linear_attention", "full_attention"]) for _ in range(c["num_hidden_layers"])]
    first = r.randrange(2)  # transformers needs both kinds
    kinds[first], kinds[1 - first] = "linear_attention", "full_attention"
    return c | {
        # a head's output may be small, and the norm after it makes the rounding errors of a small one large
        "rms_norm_eps": r.choice([5e-3, 2e-2]),
        "layer_types": kinds,
        "linear_conv_kernel_dim": r.choice([2, 3, 4]),
        "linear_key_head_dim": r.choice([16, 24]),
        "linear_value_head_dim": r.choice([16, 24]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * r.choice([1, 2]),
        "rope_parameters": c["rope_parameters"] | {"partial_rotary_factor": r.choice([0.25, 0.5, 1.0])},
    }


def _random(r: random.Random) -> Settings:
    return _small_hybrid(r, "qwen3_5_text")


def small_experts(r: random.Random) -> Settings:
    """Return random settings of experts for a small config.json."""
    return {
        "num_experts": r.choice([4, 6, 8]),
        "num_experts_per_tok": r.choice([1, 2, 3]),
        "moe_intermediate_size": r.choice([16, 24]),
        "shared_expert_intermediate_size": r.choice([16, 40]),
        "router_aux_loss_coef": r.choice([0.001, 0.01]),
    }


def _random_moe(r: random.Random) -> Settings:
    c = _small_hybrid(r, "qwen3_5_moe_text", **small_experts(r))
    return {key: value for key, value in c.items() if key != "intermediate_size"}


def _random_multimodal(
    r: random.Random,
    text_config: Callable[[random.Random], Settings] = _random,
    model_type: str = "qwen3_5",
) -> Settings:
    text = text_config(r)
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 4, "num_position_embeddings": 16}
    vision = {"model_type": f"{model_type}_vision", "out_hidden_size": text["hidden_size"], **sizes}
    return random_wrapper(model_type, text, vision)


def _next(c: Config) -> DecoderConfig:
    found = _hybrid(c, fused=True, moe=_experts(c, c["norm_topk_prob"]))
    sparse = sparse_layers(c, c["num_experts"])
    return replace(found, layers=tuple(replace(k, moe=m) for k, m in zip(found.layers, sparse, strict=True)))


def _random_next(r: random.Random) -> Settings:
    sparse = r.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    return _small_hybrid(r, "qwen3_next", norm_topk_prob=r.random() < 0.6, **small_experts(r), **sparse)


# the experts are tensors of their own as transformers saves them, and stacked in published multimodal checkpoints
MOE_MAPPINGS = (*MAPPINGS, *SHARED, *EXPERTS)
STACKED_MAPPINGS: tuple[TensorMapping, ...] = (
    *MAPPINGS,
    *SHARED,
    Concatenate(
        ("layers.{i}.moe.experts.gate_proj", "layers.{i}.moe.experts.up_proj"),
        f"{LAYER}mlp.experts.gate_up_proj",
        dim=1,
    ),
    rename("layers.{i}.moe.experts.down_proj", f"{LAYER}mlp.experts.down_proj"),
)
WITHOUT_TEXT = ("mtp.", "model.visual.")
ONLY: Config = {"hidden_act": "silu", "attn_output_gate": True}
TEXT = Family("qwen3_5_text", _decoder, MAPPINGS, _random, DEFAULTS, ONLY, carried=("mtp.",))
MOE = Family("qwen3_5_moe_text", _moe, MOE_MAPPINGS, _random_moe, MOE_DEFAULTS, ONLY, carried=("mtp.",))
FAMILIES = {
    "qwen3_5_text": TEXT,
    "qwen3_5_moe_text": MOE,
    "qwen3_5": Family(
        "qwen3_5",
        multimodal(TEXT),
        inside(MAPPINGS, "language_model"),
        _random_multimodal,
        carried=WITHOUT_TEXT,
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        multimodal(MOE),
        inside(STACKED_MAPPINGS, "language_model"),
        partial(_random_multimodal, text_config=_random_moe, model_type="qwen3_5_moe"),
        per_expert=inside(MOE_MAPPINGS, "language_model"),
        carried=WITHOUT_TEXT,
    ),
    "qwen3_next": Family("qwen3_next", _next, MOE_MAPPINGS, _random_next, NEXT_DEFAULTS, ONLY, carried=("mtp.",)),
}
