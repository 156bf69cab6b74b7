"""The sizes of published models, as their config.json gives them: for plans and rehearsals, which load no weights."""

import json
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def qwen3(dim: int, layers: int, heads: int, intermediate: int, *, tied: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**QWEN3, **sizes, "intermediate_size": intermediate, "tie_word_embeddings": tied}


def qwen3_moe(dim: int, layers: int, heads: int, kv_heads: int, expert: int) -> dict[str, Any]:
    """Return the config of a Qwen3 model of 128 experts, of which 8 serve a token."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": kv_heads}
    return {**qwen3(dim, layers, heads, 4 * expert), **names, **experts}


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 12_288),
    "Qwen3-32B": qwen3(5120, 64, 64, 25_600),
    "Qwen3-30B-A3B": qwen3_moe(2048, 48, 32, 4, 768),
    "Qwen3-235B-A22B": qwen3_moe(4096, 94, 64, 4, 1536),
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Gemma-3-4B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10_240,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def write_config(name: str, directory: Path, **changes: Any) -> Path:
    """Write the config.json of a published model, with changes, to a directory, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SHAPES[name], **changes}))
    return directory
