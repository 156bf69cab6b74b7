"""Tiny checkpoints, made by transformers, of families that ptf does not define."""

from pathlib import Path

import torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "olmo2": {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # tied, learned positions, dropout
    "mixtral": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },  # stored an expert at a time, computed stacked
    # scaled logits
    "cohere": {**SIZES, "intermediate_size": 48},
    # frequencies that change beyond 32 tokens, and change back
    "phi3": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
            "original_max_position_embeddings": 32,
        },
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},  # no attention
}


def foreign(directory: Path, model_type: str, vocab: int = 97) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab,
        initializer_range=0.2,
        **({"max_position_embeddings": 256} | CONFIGS[model_type]),
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory
