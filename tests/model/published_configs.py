"""The settings of published config.json files that change a model, and how many parameters its model card tells of, in
thousands of millions (of the language model alone, where it is multimodal). Written from memory of the files."""

from typing import Any

Config = dict[str, Any]
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
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
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
    "granite-3.3-2b": (
        {
            "model_type": "granite",
            **GRANITE,
            **sizes(49_159, 2048, 8192, 40, 32, 8, rope_theta=10_000_000.0, tie_word_embeddings=True),
        },
        2.53,
    ),
    "Phi-3-mini-4k": ({"model_type": "phi3", **sizes(32_064, 3072, 8192, 32, 32, 32, sliding_window=2047)}, 3.82),
    "phi-4": (
        {"model_type": "phi3", **sizes(100_352, 5120, 17_920, 40, 40, 10, sliding_window=None, rope_theta=250_000)},
        14.66,
    ),
    "Seed-OSS-36B": (
        {"model_type": "seed_oss", **sizes(155_136, 5120, 27_648, 64, 80, 8, head_dim=128, attention_bias=True)},
        36.15,
    ),
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
    "DeepSeek-V3": (  # without its layer that predicts a second token
        {
            "model_type": "deepseek_v3",
            **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            "v_head_dim": 128,
            **sizes(129_280, 7168, 18_432, 61, 128, 128),
        },
        671.0,
    ),
    "Qwen3-Next-80B-A3B": (  # 79 without embeddings
        {
            "model_type": "qwen3_next",
            **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
            **{"shared_expert_intermediate_size": 512, "full_attention_interval": 4, "partial_rotary_factor": 0.25},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "norm_topk_prob": True},
            **sizes(151_936, 2048, 5120, 48, 16, 2, head_dim=256, rope_theta=10_000_000),
        },
        79.67,
    ),
    "GLM-4.5-Air": (  # its card tells of 106
        {
            "model_type": "glm4_moe",
            **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
            **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
            "attention_bias": True,
            **sizes(151_552, 4096, 10_944, 46, 96, 8, head_dim=128, rope_theta=1_000_000),
        },
        106.85,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            "shared_expert_intermediate_size": 5632,
            **sizes(151_936, 2048, 5632, 24, 16, 16, rope_theta=1_000_000.0),
        },
        14.3,
    ),
    "gemma-2-2b": ({"model_type": "gemma2", **sizes(256_000, 2304, 9216, 26, 8, 4, head_dim=256)}, 2.61),
}
