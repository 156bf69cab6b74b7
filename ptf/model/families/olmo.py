"""OLMo 2 (`Olmo2ForCausalLM`): norms after attention and MLP and none before them; the queries of all heads are
normalised together, and the keys.

OLMo 3 (`Olmo3ForCausalLM`): OLMo 2 in which three of four layers have a sliding window. Only the layers without one
scale their rotary frequencies, as its authors wrote it for vLLM (https://github.com/vllm-project/vllm/pull/24534).
transformers 5.10 scales those of all layers (https://github.com/huggingface/transformers/pull/45945);
`ptf.model.verify` corrects its model before comparing.

EXAONE 4.0 (`Exaone4ForCausalLM`): the norms of OLMo 2, after attention and MLP, and those of Qwen3, of the queries
and keys of each head. Three of four layers have a sliding window (32B), and those without one have no positions (NoPE);
where no window is set at all (1.2B), every layer has them.
"""

import random
from dataclasses import replace

from ptf.model.checkpoint_mapping import TensorMapping, rename
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.families import Family
from ptf.model.families.settings import (
    ATTENTION,
    LAYER,
    MLP,
    OUTER,
    POST_NORMS,
    SILU,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    raise_if_unsupported,
    random_dense_config,
    random_types,
    rope,
    types_of_layers,
)

MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *ATTENTION,
    *MLP,
    *(rename(f"layers.{{i}}.attn.{p}_width_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
    *POST_NORMS,
)


def decoder(c: Config, layers: tuple[Layer, ...]) -> DecoderConfig:
    """Return what OLMo 2 and OLMo 3 share, with these layers."""
    return DecoderConfig(
        **common(c),
        layers=layers,
        qk_width_norm=True,
        **biases(c),
        pre_norm=False,
        post_norm=True,
    )


def _olmo2(c: Config) -> DecoderConfig:
    return decoder(c, (Layer(rope(c)),) * c["num_hidden_layers"])


def _random_olmo2(r: random.Random) -> Settings:
    return random_dense_config(r, "olmo2", attention_bias=r.random() < 0.3)


def _olmo3(c: Config) -> DecoderConfig:
    table = rope(c)
    plain = Layer(Rope(table.theta), c["sliding_window"])
    return decoder(c, layers_by_type(c, types_of_layers(c, 4), full_attention=Layer(table), sliding_attention=plain))


def _random_olmo3(r: random.Random) -> Settings:
    c = random_dense_config(r, "olmo3", attention_bias=r.random() < 0.3, sliding_window=r.choice([3, 8, 20]))
    c["num_hidden_layers"] = r.choice([2, 4, 5])
    return c | random_types(r, c["num_hidden_layers"])


EXAONE_DEFAULTS: Config = {  # the reference's where a config.json has none
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _exaone4(c: Config) -> DecoderConfig:
    window, pattern, types = c["sliding_window"], c["sliding_window_pattern"], c.get("layer_types")
    counted = isinstance(pattern, int) and pattern > 0
    raise_if_unsupported(
        c,
        {
            # the reference fails with these too; published models with "LLLG" or without a window list their layers
            "sliding_window_pattern": types is None and not counted and f"{pattern!r} without layer_types",
            "sliding_window": window is None
            and (types is None or "sliding_attention" in types)
            and "null without layer_types that are all full_attention",
        },
    )
    table = rope(c)
    return DecoderConfig(
        **common(c),
        layers=layers_by_type(
            c,
            types_of_layers(c, pattern),
            full_attention=Layer(table if window is None else replace(table, partial=0.0)),
            sliding_attention=Layer(table, window),
        ),
        qk_norm=True,
        pre_norm=False,
        post_norm=True,
    )


def _random_exaone4(r: random.Random) -> Settings:
    c = random_dense_config(
        r, "exaone4", sliding_window=r.choice([3, 8, 20, None]), sliding_window_pattern=r.choice([2, 3, 4, "LLLG"])
    )
    if r.random() < 0.3:  # the reference then divides the width by the heads
        del c["head_dim"]
    count = c["num_hidden_layers"]
    if c["sliding_window"] is None:
        return c | {"layer_types": ["full_attention"] * count}
    if c["sliding_window_pattern"] == "LLLG":
        return c | {"layer_types": [r.choice(["full_attention", "sliding_attention"]) for _ in range(count)]}
    return c | random_types(r, count)


DEFAULTS: Config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096}
FAMILIES = {
    "olmo2": Family("olmo2", _olmo2, MAPPINGS, _random_olmo2, DEFAULTS, SILU),
    "olmo3": Family("olmo3", _olmo3, MAPPINGS, _random_olmo3, DEFAULTS, SILU),
    "exaone4": Family(
        "exaone4",
        _exaone4,
        (*OUTER, *ATTENTION, *MLP, *POST_NORMS),
        _random_exaone4,
        EXAONE_DEFAULTS,
        {**SILU, "attention_dropout": 0},
    ),
}
