"""The tensors that many families have: their unified names and Hugging Face's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ptf.model.checkpoint_mapping import Stack, TensorMapping, rename

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


def inside(mappings: Iterable[Any], part: str) -> tuple[TensorMapping, ...]:
    """Return the mappings of a wrapper whose language model lies in `part` of `model.`: `model.layers.0.…` is there
    `model.language_model.layers.0.…`."""
    return tuple(replace(mapping, other=mapping.other.replace("model.", f"model.{part}.", 1)) for mapping in mappings)
