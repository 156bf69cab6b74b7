"""Qwen3.5 (`Qwen3_5ForCausalLM`, and the text part of `Qwen3_5ForConditionalGeneration`): three layers of linear
attention by the gated delta rule for every layer of softmax attention, whose output has a gate and whose heads are
rotated in part; norms that scale by 1 + weight.

A multimodal checkpoint trains its language model, on text alone: then the three coordinates of a position are equal,
and its interleaved rotation is the plain one. The vision tower, and the layers that predict several tokens (`mtp.`),
are copied to the export unchanged.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Rename, TensorMapping
from ptf.model.config import DecoderConfig, GatedDelta, Layer, Rope
from ptf.model.families import DENSE, LAYER, Family, common, inside, raise_if_unsupported, rope, small

PARTIAL = 0.25  # of a head's dimensions are rotated, where a config.json does not say
LINEAR_ATTENTION: tuple[TensorMapping, ...] = (
    *(
        Rename(f"layers.{{i}}.attn.{ours}", f"{LAYER}linear_attn.{theirs}")
        for ours, theirs in (
            ("conv.weight", "conv1d.weight"),
            ("a_log", "A_log"),
            ("dt_bias", "dt_bias"),
            ("norm.weight", "norm.weight"),
            ("out_proj.weight", "out_proj.weight"),
        )
    ),
    *(
        Rename(f"layers.{{i}}.attn.{p}_proj.weight", f"{LAYER}linear_attn.in_proj_{p}.weight")
        for p in ("qkv", "z", "b", "a", "qkvz", "ba")
    ),
)
MAPPINGS: tuple[TensorMapping, ...] = (*DENSE, *LINEAR_ATTENTION)
DEFAULTS = {  # the reference's defaults where a config.json has none
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def hybrid_layers(c: Mapping[str, Any], turn: Rope) -> tuple[Layer, ...]:
    """Return the layers by their `layer_types`; without them, every fourth has softmax attention."""
    count, step = c["num_hidden_layers"], c.get("full_attention_interval") or 4
    types: Sequence[str] = c.get("layer_types") or [
        "linear_attention" if (i + 1) % step else "full_attention" for i in range(count)
    ]
    unknown = sorted(set(types) - {"linear_attention", "full_attention"})
    raise_if_unsupported(str(c["model_type"]), {"layer_types": unknown})
    if len(types) != count:
        raise UserError(f"{c['model_type']}: config.json has num_hidden_layers {count} and {len(types)} layer_types")
    return tuple(Layer(turn, delta=kind == "linear_attention") for kind in types)


def gated_delta(c: Mapping[str, Any], *, fused: bool) -> GatedDelta:
    """Return the sizes of linear attention. Raise UserError for heads of values that are no multiple of the keys'."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if values % keys:
        raise UserError(f"{c['model_type']}: linear_num_value_heads {values} is no multiple of {keys} key heads")
    sizes = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
    return GatedDelta(keys, values, *sizes, fused=fused)


def refuse_unsupported(c: Mapping[str, Any]) -> None:
    """Raise UserError naming the settings of a config.json that are not implemented."""
    act, gate = c.get("hidden_act", "silu"), c.get("attn_output_gate", True)
    raise_if_unsupported(
        str(c["model_type"]), {"hidden_act": act != "silu" and act, "attn_output_gate: false": not gate}
    )


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {**DEFAULTS, **c}
    refuse_unsupported(c)
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **common(c),
        tied=c.get("tie_word_embeddings", False),
        layers=hybrid_layers(c, rope(c, partial=PARTIAL)),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        norm_offset=True,
        attention_gate=True,
        delta=gated_delta(c, fused=False),
    )


def multimodal_config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map the text part of a multimodal config.json."""
    text = {**c["text_config"]}
    return config({**text, "tie_word_embeddings": c.get("tie_word_embeddings", text.get("tie_word_embeddings", False))})


def small_hybrid(r: random.Random, model_type: str, **more: Any) -> dict[str, Any]:
    """Return a random config.json of a model with linear attention, small enough to verify in a second."""
    sizes = {"hidden_size": 96, "num_hidden_layers": r.choice([2, 3]), "head_dim": r.choice([16, 32])}
    c = small(r, model_type, attention_bias=r.random() < 0.2, **sizes, **more)
    keys = r.choice([1, 2, 3])
    kinds = [r.choice(["linear_attention", "full_attention"]) for _ in range(c["num_hidden_layers"])]
    first = r.randrange(2)  # transformers needs both kinds
    kinds[first], kinds[1 - first] = "linear_attention", "full_attention"
    return c | {
        # a head's output may be small, and the norm after it makes the rounding errors of a small one large
        "rms_norm_eps": r.choice([1e-3, 1e-2]),
        "layer_types": kinds,
        "linear_conv_kernel_dim": r.choice([2, 3, 4]),
        "linear_key_head_dim": r.choice([16, 24]),
        "linear_value_head_dim": r.choice([16, 24]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * r.choice([1, 2]),
        "rope_parameters": c["rope_parameters"] | {"partial_rotary_factor": r.choice([0.25, 0.5, 1.0])},
    }


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    return small_hybrid(r, "qwen3_5_text")


def random_multimodal_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json of a multimodal model for the verifier."""
    text = random_config(r)
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    return {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_vision", **vision},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


TEXT = Family("qwen3_5_text", config, MAPPINGS, random_config, carried=("mtp.",))
FAMILIES = {
    "qwen3_5_text": TEXT,
    "qwen3_5": replace(
        TEXT,
        model_type="qwen3_5",
        config=multimodal_config,
        small=random_multimodal_config,
        mappings=inside(MAPPINGS, "language_model"),
        carried=("mtp.", "model.visual."),
    ),
}
