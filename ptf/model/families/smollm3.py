"""SmolLM3 (`SmolLM3ForCausalLM`): Llama in which every fourth layer has no rotary positions (NoPE); those layers may
have a sliding window."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.errors import UserError
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_types
from ptf.model.families.names import DENSE
from ptf.model.families.settings import common, layers_by_type, raise_if_unsupported, rope


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {"num_key_value_heads": 4, "tie_word_embeddings": True, **c}  # the reference's defaults
    raise_if_unsupported(c, hidden_act="silu")
    count, every = c["num_hidden_layers"], c.get("no_rope_layer_interval", 4)
    rotates = c.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1: it has positions
    if len(rotates) < count:
        raise UserError(f"smollm3: config.json has num_hidden_layers {count} and {len(rotates)} no_rope_layers")
    slides = c.get("use_sliding_window", False) and c.get("sliding_window") is not None
    types = c.get("layer_types") or [
        "sliding_attention" if slides and not rotates[i] else "full_attention" for i in range(count)
    ]
    table = rope(c, theta=2_000_000.0)
    window = c.get("sliding_window") if slides else None
    layers = layers_by_type(c, types, {"full_attention": Layer(table), "sliding_attention": Layer(table, window)})
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **common(c),
        layers=tuple(
            kind if rotated else replace(kind, rope=replace(table, partial=0.0))
            for kind, rotated in zip(layers, rotates, strict=False)
        ),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
    )


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    c = random_dense_config(
        r,
        "smollm3",
        pad_token_id=0,  # the default is outside this vocabulary
        attention_bias=r.random() < 0.3,
        mlp_bias=r.random() < 0.3,
        **r.choice([{}, {"use_sliding_window": True, "sliding_window": r.choice([3, 8])}]),
    )
    listed = [r.choice([0, 1]) for _ in range(c["num_hidden_layers"])]
    if "sliding_window" in c:
        c |= random_types(r, c["num_hidden_layers"])
    return c | r.choice([{"no_rope_layer_interval": r.choice([2, 3])}, {"no_rope_layers": listed}])


FAMILIES = {"smollm3": Family("smollm3", config, DENSE, random_config)}
