"""Mistral (`MistralForCausalLM`): Llama in which every layer may have a sliding window.

Ministral 3 (`Ministral3ForCausalLM`): Mistral whose queries grow with their position beyond the length of pre-training,
as in Llama 4.

Mistral 3 (`Mistral3ForConditionalGeneration`: Mistral Small 3.1 and 3.2, Ministral 3): the text model of one of them
behind a vision tower. The language model trains; the vision tensors are copied to the export unchanged.
"""

import random
from dataclasses import replace

from ptf.model.config import DecoderConfig, Layer
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_rope, random_wrapper
from ptf.model.families.names import DENSE, WRAPPER
from ptf.model.families.settings import Config, Settings, common, raise_if_unsupported, rope, text_part

DEFAULTS: Config = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
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
    layers = (Layer(rope(c), c.get("sliding_window", 4096)),) * c["num_hidden_layers"]
    return DecoderConfig(**common(c), layers=layers)


def _random_mistral(r: random.Random) -> Settings:
    return random_dense_config(r, "mistral", sliding_window=r.choice([None, 1, 5, 16]))


def _ministral(c: Config) -> DecoderConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or YARN
    beta, original = (parameters.get(k) or 0 for k in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    without = {"llama_4_scaling_beta without original_max_position_embeddings": beta and not original}
    raise_if_unsupported(c, without)
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
    "mistral": Family("mistral", _mistral, DENSE, _random_mistral, DEFAULTS, ONLY),
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
    whole = random_wrapper("mistral3", text, {"model_type": "pixtral", **vision})
    return whole | {"multimodal_projector_bias": r.random() < 0.5}


FAMILIES = {**TEXTS, "mistral3": Family("mistral3", _multimodal, DENSE, _random_multimodal, **WRAPPER)}
