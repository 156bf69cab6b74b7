"""Qwen3, dense (`Qwen3ForCausalLM`): grouped-query attention with normalised queries and keys, SwiGLU, pre-norm."""

from collections.abc import Mapping
from typing import Any

from ptf.errors import UserError
from ptf.model.config import DecoderConfig
from ptf.model.families import Family, Rename


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Raises UserError naming every setting that this definition does not implement."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "rope scaling": kind not in ("default", None) and kind,
        "attention_bias": c.get("attention_bias"),
        "use_sliding_window": c.get("use_sliding_window"),
        "hidden_act": c.get("hidden_act", "silu") != "silu" and c.get("hidden_act"),
    }
    if any(refused.values()):
        raise UserError("qwen3: not supported: " + ", ".join(f"{k}: {v}" for k, v in refused.items() if v))
    return DecoderConfig(
        vocab=c["vocab_size"],
        dim=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c.get("num_key_value_heads", c["num_attention_heads"]),
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        hidden=c["intermediate_size"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", c.get("rope_theta", 10_000.0)),
        max_positions=c.get("max_position_embeddings", 32_768),
        tied=c.get("tie_word_embeddings", False),
        qk_norm=True,
        init_std=c.get("initializer_range", 0.02),
    )


LAYER = "model.layers.{i}."
QWEN3 = Family(
    "qwen3",
    config,
    (
        Rename("embed.weight", "model.embed_tokens.weight"),
        *(Rename(f"layers.{{i}}.attn.{p}_proj.weight", f"{LAYER}self_attn.{p}_proj.weight") for p in "qkvo"),
        *(Rename(f"layers.{{i}}.attn.{p}_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
        *(Rename(f"layers.{{i}}.mlp.{p}_proj.weight", f"{LAYER}mlp.{p}_proj.weight") for p in ("gate", "up", "down")),
        Rename("layers.{i}.attn_norm.weight", f"{LAYER}input_layernorm.weight"),
        Rename("layers.{i}.mlp_norm.weight", f"{LAYER}post_attention_layernorm.weight"),
        Rename("norm.weight", "model.norm.weight"),
        Rename("head.weight", "lm_head.weight"),
    ),
)
