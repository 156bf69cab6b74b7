"""Tiny checkpoints, made by transformers, of multimodal models: a language model with a vision tower, or more, beside
it."""

from pathlib import Path
from typing import Any

import torch

IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "sliding_window": 64,
    "attention_chunk_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "conv_L_cache": 3,
    "initializer_range": 0.2,
    **IDS,
}
OTHER = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_hidden_layers": 2,  # as many as the language model has
    "num_global_layers": 1,
    "num_heads": 4,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "vision_output_dim": 224,
    "projection_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "output_proj_dims": 32,
    "mm_embed_dim": 32,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "intermediate_layers_indices": [0, 1],
    "vocab_size": 16,
    "conf_num_attention_heads": 4,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": [8, 4],
    "input_feat_size": 16,
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 16,
}
SHARED = ["sliding_attention", "full_attention"] * 2
EXTRAS: dict[str, dict[str, dict[str, Any]]] = {  # by model type and part
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": SHARED,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 93,  # ids beyond stand for images and sounds
        },
        "vision_config": {"vocab_size": 2, "vocab_offset": 93},
        "audio_config": {"vocab_size": 2, "vocab_offset": 95},
    },
    "gemma4": {
        "text_config": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SHARED},
        "vision_config": {"model_type": "gemma4_vision", "position_embedding_size": 16},
    },
    "qwen3_5": {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "glm4v_moe": {"text_config": {"head_dim": 16}},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
}
MROPE = [2, 1, 1]  # of the four pairs of a head of eight


def wrapper_config(model_type: str, vocab: int) -> Any:
    """Return a small config: each size that the architecture's config and its parts have."""
    from transformers import AutoConfig

    extras = EXTRAS.get(model_type, {})
    made: dict[str, Any] = {}
    for key, value in AutoConfig.for_model(model_type).to_dict().items():
        if key.endswith("_config") and (isinstance(value, dict) or key in extras):
            sizes = TEXT if key == "text_config" else OTHER
            part = {k: sizes.get(k, v) for k, v in (value or sizes).items()}
            for derived in ("layer_types", "mlp_layer_types", "moe_layers", "no_rope_layers", "rope_scaling"):
                part.pop(derived, None)
            if key == "text_config":
                part |= {k: vocab for k in ("vocab_size", "vocab_size_per_layer_input") if k in part}
                rope = part.get("rope_parameters")
                if isinstance(rope, dict) and ("mrope_section" in rope or model_type.startswith(("qwen", "glm"))):
                    part["rope_parameters"] = {**rope, "mrope_section": MROPE, "rope_type": "default"}
            made[key] = part | extras.get(key, {})
        elif key.endswith(("token_id", "token_index")):
            made[key] = IDS.get(key, value if value is None else vocab - 7)
        elif key not in ("architectures", "transformers_version", "model_type", "vocab_size"):
            made[key] = value
    return AutoConfig.for_model(model_type, **made)


def wrapper(directory: Path, model_type: str, vocab: int = 97, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint, of which every bias and norm does something."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(wrapper_config(model_type, vocab), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    if dtype != torch.float32:
        model.to(dtype)
    model.save_pretrained(directory)
    return directory
