"""What many families share: the settings of a config.json under the same keys, as they become fields of DecoderConfig,
the tensors that have the same names, and random small config.json files, of which the verifier makes the members of a
family."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Stack, TensorMapping, rename
from ptf.model.config import Layer, Rope

Config = Mapping[str, Any]  # a config.json
Settings = dict[str, Any]  # a config.json that is being made
SILU: Config = {"hidden_act": "silu"}
# the tensors that many families have: their unified names and Hugging Face's
LAYER = "model.layers.{i}."
OUTER: tuple[TensorMapping, ...] = (
    rename("embed.weight", "model.embed_tokens.weight"),
    rename("norm.weight", "model.norm.weight"),
    rename("head.weight", "lm_head.weight"),
)
ATTENTION: tuple[TensorMapping, ...] = (
    *(
        rename(f"layers.{{i}}.attn.{p}_proj.{w}", f"{LAYER}self_attn.{p}_proj.{w}")
        for p in "qkvo"
        for w in ("weight", "bias")
    ),
    *(rename(f"layers.{{i}}.attn.{p}_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
)
NORMS: tuple[TensorMapping, ...] = (
    rename("layers.{i}.attn_norm.weight", f"{LAYER}input_layernorm.weight"),
    rename("layers.{i}.mlp_norm.weight", f"{LAYER}post_attention_layernorm.weight"),
)
MLP: tuple[TensorMapping, ...] = tuple(
    rename(f"layers.{{i}}.mlp.{p}_proj.{w}", f"{LAYER}mlp.{p}_proj.{w}")
    for p in ("gate", "up", "down")
    for w in ("weight", "bias")
)
POST_NORMS: tuple[TensorMapping, ...] = (  # after attention and after the MLP
    rename("layers.{i}.attn_post_norm.weight", f"{LAYER}post_attention_layernorm.weight"),
    rename("layers.{i}.mlp_post_norm.weight", f"{LAYER}post_feedforward_layernorm.weight"),
)
DENSE: tuple[TensorMapping, ...] = (*OUTER, *ATTENTION, *NORMS, *MLP)
EXPERTS: tuple[TensorMapping, ...] = tuple(
    Stack((f"layers.{{i}}.moe.experts.{p}_proj",), f"{LAYER}mlp.experts.{{e}}.{p}_proj.weight")
    for p in ("gate", "up", "down")
)
WRAPPER: dict[str, Any] = {  # of a Family whose language model is in `language_model.`, beside a vision tower
    "prefix": "language_model.",
    "aliases": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    "carried": ("vision_tower.", "multi_modal_projector."),
}


def raise_if_unsupported(c: Config, found: Config | None = None, **only: Any) -> None:
    """Raise UserError naming every setting of a config.json that ptf does not implement.

    These are the settings of `only` that have another value than the one given here, and those of `found` that are
    truthy.
    """
    unsupported = {key: c[key] for key, value in only.items() if c.get(key) not in (None, value)}
    unsupported |= {key: value for key, value in (found or {}).items() if value}
    if unsupported:
        listed = ", ".join(f"{key}: {value}" for key, value in unsupported.items())
        raise UserError(f"{c['model_type']}: not supported: {listed}")


def rope(
    c: Config,
    parameters: Config | None = None,
    theta: float = 10_000.0,
    partial: float | None = None,
) -> Rope:
    """Return the rotary settings of a config.json, in the form of transformers 5 (`rope_parameters`) or before
    (`rope_theta`, `rope_scaling`).

    `partial` is the default share of a head's dimensions that is rotated, in families that read
    `partial_rotary_factor`; the others refuse it.
    """
    if parameters is None:
        parameters = {**(c.get("rope_parameters") or c.get("rope_scaling") or {})}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    base = float(parameters.get("rope_theta") or c.get("rope_theta") or theta)
    raise_if_unsupported(c, {"rope_type": kind not in ("default", "linear", "llama3", "yarn") and kind})
    share = parameters.get("partial_rotary_factor") or c.get("partial_rotary_factor") or partial or 1.0
    if partial is None:
        raise_if_unsupported(c, {"partial_rotary_factor": share != 1.0 and share})
    original = parameters.get("original_max_position_embeddings") or c.get("max_position_embeddings", 0)
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return Rope(base, kind, parameters["factor"], original, low, high, partial=share)
    if kind == "yarn":
        factor = parameters.get("factor") or c["max_position_embeddings"] / original
        low, high = parameters.get("beta_slow") or 1.0, parameters.get("beta_fast") or 32.0

        def at(m: float) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        # the attention factor (YaRN, eq. 22): 0.1 ln(factor) + 1, unless the config gives another
        if (scale := parameters.get("attention_factor")) is not None:
            scale = float(scale)
        elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
            scale = at(parameters["mscale"]) / at(parameters["mscale_all_dim"])
        else:
            scale = at(1.0)
        return Rope(base, kind, factor, original, low, high, parameters.get("truncate", True), scale, share)
    return Rope(base, kind, parameters.get("factor", 1.0), partial=share)


def types_of_layers(c: Config, every: int, others: str = "sliding_attention") -> Sequence[str]:
    """Return the `layer_types` of a config.json; without them, full attention in every so many-th layer."""
    return c.get("layer_types") or [
        others if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])
    ]


def layers_by_type(c: Config, types: Sequence[str], **kinds: Layer) -> tuple[Layer, ...]:
    """Return the layers by their `layer_types`; `kinds` are the types that there are."""
    raise_if_unsupported(c, {"layer_types": sorted(set(types) - set(kinds))})
    if len(types) != c["num_hidden_layers"]:
        raise UserError(
            f"{c['model_type']}: config.json has num_hidden_layers {c['num_hidden_layers']} and {len(types)} "
            "layer_types"
        )
    return tuple(kinds[t] for t in types)


def sparse_layers(c: Config, experts: int) -> list[bool]:
    """Return which layers are mixtures of experts, by Qwen's `mlp_only_layers` and `decoder_sparse_step`."""
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return [i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(c["num_hidden_layers"])]


def text_part(c: Config, tied: bool = False) -> Settings:
    """Return the config of a multimodal model's language model, whose head is `tied` where neither part says."""
    text = c["text_config"]
    return {**text, "tie_word_embeddings": c.get("tie_word_embeddings", text.get("tie_word_embeddings", tied))}


def biases(c: Config, default: bool = False) -> Settings:
    """Return the fields of DecoderConfig that `attention_bias` sets; `default` is what it is where it is left out."""
    return dict.fromkeys(("qkv_bias", "out_bias"), c.get("attention_bias", default))


def common(c: Config) -> Settings:
    """Return the fields of DecoderConfig that every family's config.json holds under the same keys."""
    return {
        "vocab": c["vocab_size"],
        "dim": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "intermediate_size": c["intermediate_size"],
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "max_positions": c.get("max_position_embeddings", 32_768),
        "tied": c.get("tie_word_embeddings", False),
        "init_std": c.get("initializer_range", 0.02),
    }


def inside(mappings: Iterable[Any], part: str) -> tuple[TensorMapping, ...]:
    """Return the mappings of a wrapper whose language model lies in `part` of `model.`: `model.layers.0.…` is there
    `model.language_model.layers.0.…`."""
    return tuple(replace(mapping, other=mapping.other.replace("model.", f"model.{part}.", 1)) for mapping in mappings)


def random_dense_config(r: random.Random, model_type: str, **more: Any) -> dict[str, Any]:
    """Return a random config.json of a dense decoder, small enough to verify in a second."""
    kv, group, size = r.choice([1, 2, 3]), r.choice([1, 2, 4]), r.choice([8, 16, 32])
    return {
        "model_type": model_type,
        "vocab_size": r.choice([61, 96, 131]),
        # a multiple of any number of heads here; below 32 rounding alone reaches 1e-5
        "hidden_size": r.choice([48, 96]),
        "intermediate_size": r.choice([40, 64, 88]),
        "num_hidden_layers": r.choice([2, 3, 4]),
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": size,
        "max_position_embeddings": 256,
        "rms_norm_eps": r.choice([1e-6, 1e-5]),
        "tie_word_embeddings": r.random() < 0.4,
        "rope_parameters": random_rope(r, r.choice(["default", "linear", "llama3", "yarn"])),
        "initializer_range": 0.1,
        **more,
    }


def random_types(r: random.Random, layers: int) -> dict[str, Any]:
    """Return `layer_types` for a small config.json, or none in it."""
    types = [r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return r.choice([{}, {"layer_types": types}])


def random_rope(r: random.Random, kind: str) -> dict[str, Any]:
    """Return random rotary settings of a kind for a small config.json."""
    theta = {"rope_type": kind, "rope_theta": r.choice([1000.0, 10_000.0, 1_000_000.0])}
    original = {"factor": r.choice([2.0, 8.0]), "original_max_position_embeddings": r.choice([24, 32])}
    scale = r.choice([{}, {}, {"attention_factor": 1.25}, {"mscale": 1.0, "mscale_all_dim": r.choice([0.5, 1.0])}])
    truncate = r.choice([{}, {"truncate": False}])
    return {
        "default": theta,
        "linear": theta | {"factor": r.choice([2.0, 4.0])},
        "llama3": theta
        | original
        | {"low_freq_factor": r.choice([0.5, 1.5]), "high_freq_factor": r.choice([2.0, 4.0])},
        "yarn": theta
        | original
        | {"beta_fast": r.choice([8.0, 32.0]), "beta_slow": r.choice([0.5, 1.0])}
        | scale
        | truncate,
    }[kind]


def random_wrapper(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of a multimodal model with these settings of its text and of its vision tower."""
    tower = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 8, **vision}
    tied = text["tie_word_embeddings"]
    return {"model_type": model_type, "text_config": text, "vision_config": tower, "tie_word_embeddings": tied}
