"""Model families by `model_type`: how a config.json becomes a DecoderConfig, what its tensors are called, and small
random members for the verifier."""

import importlib
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Concatenate, Rename, TensorMapping
from ptf.model.config import Layer, Rope

MODULES = {  # model_type → the file of its family
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen2_moe",
    "glm4_moe": "glm4_moe",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "gpt_oss": "gpt_oss",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "smollm3": "smollm3",
    "granite": "granite",
    "phi3": "phi3",
    "seed_oss": "seed_oss",
    "ministral3": "ministral3",
    "mistral3": "mistral3",
    "exaone4": "exaone4",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: the mapping of its configs and tensor names."""

    model_type: str
    # config.json → DecoderConfig; raises UserError naming every setting that is not implemented
    config: Callable[[Mapping[str, Any]], Any]
    mappings: tuple[TensorMapping, ...]
    random_config: Callable[[random.Random], dict[str, Any]]  # a random config.json for the verifier
    # the mappings for checkpoints that store each expert by itself, in families whose `mappings` are for stacked ones
    per_expert: tuple[TensorMapping, ...] = ()
    prefix: str = ""  # prefix of all names of the language model in a checkpoint
    # other prefixes of names that checkpoints use → the one that ptf writes
    aliases: Mapping[str, str] = field(default_factory=dict)
    # prefixes of the tensors that are copied from the checkpoint to the export unchanged; `{mtp}` stands for the number
    # of a layer after the last, which predicts further tokens
    carried: tuple[str, ...] = ()

    def carries(self, name: str, config: Mapping[str, Any]) -> bool:
        """Return whether a tensor of a checkpoint with this config.json is copied to the export unchanged.

        Rotary frequencies are, which older checkpoints store and nothing reads.
        """
        first = config.get("num_hidden_layers", 0)
        after = range(first, first + (config.get("num_nextn_predict_layers") or 0))
        prefixes = (p.replace("{mtp}", str(i)) for p in self.carried for i in (after if "{mtp}" in p else (0,)))
        return name.startswith(tuple(prefixes)) or name.endswith("rotary_emb.inv_freq")

    def mappings_for(self, shapes: Mapping[str, Sequence[int]]) -> list[TensorMapping]:
        """Return the mappings of a model with parameters of these names and shapes. Raise AssertionError if one has
        none."""
        names = set(shapes)
        layers = 1 + max((int(n.split(".")[1]) for n in names if n.startswith("layers.")), default=-1)
        every = [
            mapping.at(i) for mapping in self.mappings for i in (range(layers) if "{i}" in mapping.ours[0] else (0,))
        ]
        mappings = [mapping for mapping in every if names.issuperset(mapping.ours)]
        if lost := names - {n for mapping in mappings for n in mapping.ours}:
            raise AssertionError(f"{self.model_type}: no tensor mapping for {sorted(lost)[:5]}")
        return [mapping.sized(shapes) if isinstance(mapping, Concatenate) else mapping for mapping in mappings]


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raise UserError, naming the nearest, for one that is not supported."""
    model_type = str(config.get("model_type"))
    if model_type not in MODULES:
        near = get_close_matches(model_type, MODULES, 1, 0.3)
        raise UserError(
            f"model_type {model_type!r} is not supported; ptf has {', '.join(MODULES)}"
            + (f" (nearest: {near[0]})" if near else "")
            + "; model.backend: hf trains what transformers has, and docs/add_a_model.md explains how to add a family"
        )
    return importlib.import_module(f"ptf.model.families.{MODULES[model_type]}").FAMILIES[model_type]


def raise_if_unsupported(model_type: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError naming all settings that are truthy: each is one that ptf does not implement."""
    if unsupported := [f"{k}: {v}" for k, v in settings.items() if v]:
        raise UserError(f"{model_type}: not supported: {', '.join(unsupported)}")


def rope(
    c: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
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
    raise_if_unsupported(
        str(c["model_type"]), {"rope_type": kind not in ("default", "linear", "llama3", "yarn") and kind}
    )
    share = parameters.get("partial_rotary_factor") or c.get("partial_rotary_factor") or partial or 1.0
    if partial is None:
        raise_if_unsupported(str(c["model_type"]), {"partial_rotary_factor": share != 1.0 and share})
    original = parameters.get("original_max_position_embeddings") or c.get("max_position_embeddings", 0)
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return Rope(base, kind, parameters["factor"], original, low, high, partial=share)
    if kind == "yarn":
        factor = parameters.get("factor") or c["max_position_embeddings"] / original
        low, high = parameters.get("beta_slow") or 1.0, parameters.get("beta_fast") or 32.0
        scale = _yarn_scale(factor, parameters)
        return Rope(base, kind, factor, original, low, high, parameters.get("truncate", True), scale, share)
    return Rope(base, kind, parameters.get("factor", 1.0), partial=share)


def _yarn_scale(factor: float, parameters: Mapping[str, Any]) -> float:
    """Return the attention factor (YaRN, eq. 22): 0.1 ln(factor) + 1, unless the config gives another."""

    def at(m):
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (factor_in_config := parameters.get("attention_factor")) is not None:
        return float(factor_in_config)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return at(parameters["mscale"]) / at(parameters["mscale_all_dim"])
    return at(1.0)


def layers_by_type(c: Mapping[str, Any], types: Sequence[str], ropes: Mapping[str, Rope]) -> tuple[Layer, ...]:
    """Return the layers by their `layer_types`."""
    window = {"full_attention": None, "sliding_attention": c.get("sliding_window")}
    raise_if_unsupported(str(c["model_type"]), {"layer_types": sorted(set(types) - set(window))})
    if len(types) != c["num_hidden_layers"]:
        raise UserError(
            f"{c['model_type']}: config.json has num_hidden_layers {c['num_hidden_layers']} and {len(types)} "
            "layer_types"
        )
    return tuple(Layer(ropes[t], window[t]) for t in types)


def common(c: Mapping[str, Any]) -> dict[str, Any]:
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
        "init_std": c.get("initializer_range", 0.02),
    }


LAYER = "model.layers.{i}."
# other prefixes of the tensors of a multimodal checkpoint whose language model is in `language_model.`
WRAPPER_ALIASES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
OUTER: tuple[TensorMapping, ...] = (
    Rename("embed.weight", "model.embed_tokens.weight"),
    Rename("norm.weight", "model.norm.weight"),
    Rename("head.weight", "lm_head.weight"),
)
ATTENTION: tuple[TensorMapping, ...] = (
    *(
        Rename(f"layers.{{i}}.attn.{p}_proj.{w}", f"{LAYER}self_attn.{p}_proj.{w}")
        for p in "qkvo"
        for w in ("weight", "bias")
    ),
    *(Rename(f"layers.{{i}}.attn.{p}_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
)
NORMS: tuple[TensorMapping, ...] = (
    Rename("layers.{i}.attn_norm.weight", f"{LAYER}input_layernorm.weight"),
    Rename("layers.{i}.mlp_norm.weight", f"{LAYER}post_attention_layernorm.weight"),
)
MLP: tuple[TensorMapping, ...] = tuple(
    Rename(f"layers.{{i}}.mlp.{p}_proj.{w}", f"{LAYER}mlp.{p}_proj.{w}")
    for p in ("gate", "up", "down")
    for w in ("weight", "bias")
)
DENSE: tuple[TensorMapping, ...] = (*OUTER, *ATTENTION, *NORMS, *MLP)


def inside(mappings: Iterable[Any], part: str) -> tuple[TensorMapping, ...]:
    """Return the mappings of a wrapper whose language model lies in `part` of `model.`: `model.layers.0.…` is there
    `model.language_model.layers.0.…`."""
    return tuple(replace(mapping, other=mapping.other.replace("model.", f"model.{part}.", 1)) for mapping in mappings)


def random_dense_config(r: random.Random, model_type: str, **more: Any) -> dict[str, Any]:
    """Return a random config.json of a dense decoder, small enough to verify in a second."""
    kv, group, size = r.choice([1, 2, 3]), r.choice([1, 2, 4]), r.choice([8, 16, 32])
    heads = kv * group
    return {
        "model_type": model_type,
        "vocab_size": r.choice([61, 96, 131]),
        # a multiple of any number of heads here; below 32 rounding alone reaches 1e-5
        "hidden_size": r.choice([48, 96]),
        "intermediate_size": r.choice([40, 64, 88]),
        "num_hidden_layers": r.choice([2, 3, 4]),
        "num_attention_heads": heads,
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
