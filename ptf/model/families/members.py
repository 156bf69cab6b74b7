"""Random small config.json files, of which the verifier makes the members of a family."""

import random
from typing import Any


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
