"""The settings of published config.json files that change a model and are not all defaults of transformers' class, and
how many parameters its model card tells of, in thousands of millions (of the language model, where there is more).
Written from memory of the files."""

import random
from typing import Any

from ptf.model.families import MODULES, family_of

Config = dict[str, Any]
TEXTS = [  # families of models that read text alone
    name for name in MODULES if "text_config" not in family_of({"model_type": name}).random_config(random.Random(0))
]
EVERY_FOURTH = [int((i + 1) % 4 != 0) for i in range(36)]


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EXAONE = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "max_position_embeddings": 131_072}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED: dict[str, tuple[Config, float]] = {
    "OLMo-2-1124-7B": (
        {"model_type": "olmo2", **sizes(100_352, 4096, 11_008, 32, 32, 32, rope_theta=500_000, rms_norm_eps=1e-6)},
        7.30,
    ),
    "Olmo-3-7B": (
        {"model_type": "olmo3", **sizes(100_278, 4096, 11_008, 32, 32, 32, rope_theta=500_000, rope_scaling=YARN)},
        7.30,
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            "no_rope_layers": EVERY_FOURTH,
            **sizes(128_256, 2048, 11_008, 36, 16, 4, rope_theta=5_000_000.0, tie_word_embeddings=True),
        },
        3.08,
    ),
    "Phi-3-mini-4k": ({"model_type": "phi3", **sizes(32_064, 3072, 8192, 32, 32, 32, sliding_window=2047)}, 3.82),
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                **sizes(131_072, 5120, 32_768, 40, 32, 8, head_dim=128, rope_theta=1e9, sliding_window=None),
            },
        },
        23.57,
    ),
    "EXAONE-4.0-1.2B": (
        {
            "model_type": "exaone4",
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 30,
            "rope_scaling": LLAMA3,
            **EXAONE,
            **sizes(102_400, 2048, 4096, 30, 32, 8, head_dim=64, tie_word_embeddings=True),
        },
        1.28,
    ),
    "EXAONE-4.0-32B": (
        {
            "model_type": "exaone4",
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
            "rope_scaling": LLAMA3,
            **EXAONE,
            **sizes(102_400, 5120, 27_392, 64, 40, 8, head_dim=128, tie_word_embeddings=False),
        },
        32.0,
    ),
    "gemma-2-2b": ({"model_type": "gemma2", **sizes(256_000, 2304, 9216, 26, 8, 4, head_dim=256)}, 2.61),
}
