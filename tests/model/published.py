"""Checkpoints in the forms in which models are published: gpt-oss in MXFP4, Gemma 3 and Mistral 3 with a vision tower,
Phi-3 with fused projections, GLM-4.5 and DeepSeek-V3 in bf16 with a bias in fp32 and a layer that predicts further
tokens."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ptf.model.families import family_of
from ptf.model.reference import random_reference
from tests.tiny import configured

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
}


def packed(tensor: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random MXFP4 of the shape of [experts, in, out]: every bit pattern of a value, exponents around 1."""
    experts, into, out = tensor.shape
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8, generator=g)
    return blocks, torch.randint(117, 127, (experts, out, into // 32), dtype=torch.uint8, generator=g)


def mxfp4_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Write a gpt_oss checkpoint as it is published; return its tensors in bf16 as transformers dequantises them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt_oss", **SIZES), dtype=torch.bfloat16
        ).save_pretrained(directory)
    whole = load_file(directory / "model.safetensors")
    stored = dict(whole)
    for seed, name in enumerate(
        sorted(n for n in whole if n.endswith("experts.gate_up_proj") or n.endswith("experts.down_proj"))
    ):
        blocks, scales = packed(whole[name], seed)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)
        assert whole[name].dtype == torch.bfloat16
        assert whole[name].abs().max() > 0
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    quantisation = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    configured(directory, quantization_config=quantisation)
    return whole


def multimodal_checkpoint(directory: Path, model_type: str = "gemma3") -> Path:
    """Write a checkpoint with a vision tower."""
    config = family_of({"model_type": model_type}).random_config(random.Random("published"))
    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **settings))
        made.save_pretrained(directory)
    return directory


def predicting_checkpoint(directory: Path, model_type: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint in bf16 whose layer after the last predicts further tokens; return its tensors."""
    config = family_of({"model_type": model_type}).random_config(random.Random("published")) | {
        "tie_word_embeddings": False
    }
    random_reference(config, 0).save_pretrained(directory)
    fp32 = "e_score_correction_bias"
    whole = {n: t if n.endswith(fp32) else t.bfloat16() for n, t in load_file(directory / "model.safetensors").items()}
    layers, dim = config["num_hidden_layers"], config["hidden_size"]
    g = torch.Generator().manual_seed(0)
    after = {"eh_proj.weight": (dim, 2 * dim), "shared_head.norm.weight": (dim,), f"mlp.gate.{fp32}": (4,)}
    for name, shape in after.items():
        drawn = torch.randn(shape, generator=g)
        whole[f"model.layers.{layers}.{name}"] = drawn if name.endswith(fp32) else drawn.bfloat16()
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    configured(directory, num_nextn_predict_layers=1, dtype="bfloat16")
    return whole


def fused_checkpoint(directory: Path) -> Path:
    """Write a Phi-3 checkpoint, whose projections share tensors."""
    config = family_of({"model_type": "phi3"}).random_config(random.Random("published"))
    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **settings))
        made.save_pretrained(directory)
    assert any(name.endswith("qkv_proj.weight") for name in load_file(directory / "model.safetensors"))
    return directory
