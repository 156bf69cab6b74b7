"""Mistral (`MistralForCausalLM`): Llama in which every layer may have a sliding window.

Ministral 3 (`Ministral3ForCausalLM`): Mistral whose queries grow with their position beyond the length of pre-training,
as in Llama 4.

Mistral 3 (`Mistral3ForConditionalGeneration`: Mistral Small 3.1 and 3.2, Ministral 3): the text model of one of them
behind a vision tower. The language model trains; the vision tensors are copied to the export unchanged.

Phi-3 and Phi-4 (`Phi3ForCausalLM`): Mistral whose checkpoints hold queries, keys and values in one tensor, gates and
ups in another; part of a head may be rotated.

Left out: longrope (Phi-3 and Phi-3.5 with 128K tokens, Phi-4-mini), whose frequencies change with the length of the
document; and dropout.
"""

import random
from dataclasses import replace

from ptf.model.checkpoint_mapping import Concatenate, TensorMapping, rename
from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.settings import (
    DENSE,
    LAYER,
    NORMS,
    OUTER,
    SILU,
    WRAPPER,
    Config,
    Settings,
    common,
    raise_if_unsupported,
    random_dense_config,
    random_rope,
    random_wrapper,
    rope,
    text_part,
)

MINISTRAL_DEFAULTS = {  # the reference's where a config.json has none
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
YARN = {  # the reference's default
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral(c: Config) -> DecoderConfig:
    layer = Layer(rope(c), c.get("sliding_window", 4096))
    return DecoderConfig(**common(c), layers=(layer,) * c["num_hidden_layers"])


def _random_mistral(r: random.Random) -> Settings:
    return random_dense_config(r, "mistral", sliding_window=r.choice([None, 1, 5, 16]))


def _ministral(c: Config) -> DecoderConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or YARN
    beta, original = (parameters.get(k) or 0 for k in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    raise_if_unsupported(c, {"llama_4_scaling_beta without original_max_position_embeddings": beta and not original})
    table = rope(c, parameters)
    if beta:
        table = replace(table, query_growth=beta, original_positions=original)
    return DecoderConfig(
        **common(c),
        layers=(Layer(table, c.get("sliding_window")),) * c["num_hidden_layers"],
    )


def _random_ministral(r: random.Random) -> Settings:
    parameters = random_rope(r, r.choice(["yarn", "yarn", "default"])) | {
        "original_max_position_embeddings": r.choice([8, 16, 32]),
        "llama_4_scaling_beta": r.choice([0.1, 0.5]),
    }
    return random_dense_config(
        r, "ministral3", rope_parameters=parameters, sliding_window=r.choice([None, None, 5, 16])
    )


ONLY: Config = {"hidden_act": "silu", "layer_types": []}
TEXTS = {
    "mistral": Family(
        "mistral",
        _mistral,
        DENSE,
        _random_mistral,
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
        ONLY,
    ),
    "ministral3": Family("ministral3", _ministral, DENSE, _random_ministral, MINISTRAL_DEFAULTS, ONLY),
}


def _multimodal(c: Config) -> DecoderConfig:
    # Mistral Small 3.1 says nothing of its head (from memory of its config.json), and has one of its own
    text = {"model_type": "mistral", **text_part(c)}
    raise_if_unsupported(c, {"text_config.model_type": (kind := text["model_type"]) not in TEXTS and kind})
    return TEXTS[kind].config(text)


def _random_multimodal(r: random.Random) -> Settings:
    text = TEXTS[r.choice([*TEXTS])].random_config(r)
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 16}
    return random_wrapper("mistral3", text, {"model_type": "pixtral", **vision}) | {
        "multimodal_projector_bias": r.random() < 0.5
    }


ATTN, MLP = "layers.{i}.attn.", "layers.{i}.mlp."
PHI_MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *NORMS,
    Concatenate(tuple(f"{ATTN}{p}_proj.weight" for p in "qkv"), f"{LAYER}self_attn.qkv_proj.weight"),
    rename(f"{ATTN}o_proj.weight", f"{LAYER}self_attn.o_proj.weight"),
    Concatenate(tuple(f"{MLP}{p}_proj.weight" for p in ("gate", "up")), f"{LAYER}mlp.gate_up_proj.weight"),
    rename(f"{MLP}down_proj.weight", f"{LAYER}mlp.down_proj.weight"),
)


def _phi3(c: Config) -> DecoderConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"  # Phi-3 calls longrope su and yarn, too
    raise_if_unsupported(c, {"rope_type": kind != "default" and kind})
    layer = Layer(rope(c, parameters, partial=1.0), c.get("sliding_window"))
    return DecoderConfig(**common(c), layers=(layer,) * c["num_hidden_layers"])


def _random_phi3(r: random.Random) -> Settings:
    partial = r.choice([{}, {"partial_rotary_factor": r.choice([0.5, 0.75])}])
    return random_dense_config(
        r,
        "phi3",
        pad_token_id=0,  # the default is outside this vocabulary
        sliding_window=r.choice([None, 5, 16]),
        rope_parameters=random_rope(r, "default") | partial,
    )


FAMILIES = {
    **TEXTS,
    "mistral3": Family("mistral3", _multimodal, DENSE, _random_multimodal, **WRAPPER),
    "phi3": Family(
        "phi3", _phi3, PHI_MAPPINGS, _random_phi3, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, SILU
    ),
}
