"""A Hugging Face directory from a GGUF file: weights dequantised to bf16, tied, and the tokenizer that the file holds.

transformers reads such files too, but takes special tokens from the class of the model's family instead of the file,
and loses those that are added without being special. Here every id is that of the file.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# how text is split before merges, by `tokenizer.ggml.pre`, and what is done to it before that
SPLITS: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None]] = {
    "smollm": ([{"type": "Digits", "individual_digits": True}, {"use_regex": True}], None),
    "qwen2": (
        [
            {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False},
            {"use_regex": False},
        ],
        {"type": "NFC"},
    ),
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write(file: Path, into: Path) -> None:
    """Write the model of a GGUF file. Raise ValueError for an architecture, a tensor or a token that is not known."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] not in CLASSES:
        raise ValueError(f"architecture {fields['general.architecture']} is not one of {', '.join(CLASSES)}")
    into.mkdir(parents=True, exist_ok=True)
    ids = {kind: fields.get(f"tokenizer.ggml.{name}_token_id") for kind, name in SPECIAL.items()}
    numbers = {f"{kind}_token_id": token for kind, token in ids.items() if token is not None and kind != "unk"}
    files = {
        "config.json": config(fields) | numbers,
        "generation_config.json": numbers,
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields, ids),
    }
    for name, content in files.items():
        (into / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    # transformers asks for the format
    save_file(dict(weights(reader, fields)), into / "model.safetensors", {"format": "pt"})


SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def config(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields["general.architecture"]
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields[f"{kind}.embedding_length"],
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "num_attention_heads": fields[f"{kind}.attention.head_count"],
        "num_key_value_heads": fields[f"{kind}.attention.head_count_kv"],
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(fields[f"{kind}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(fields[f"{kind}.rope.freq_base"]),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "transformers_version": "5.10.4",  # whose form this is; without one it warns of Mistral's old tokenizers
    }


def _decimal(value: float) -> float:
    """The shortest number that the file's fp32 stands for."""
    return float(str(np.float32(value)))


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with the ids of the file."""
    if (split := fields["tokenizer.ggml.pre"]) not in SPLITS or fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"tokenizer {fields['tokenizer.ggml.model']}/{split} is not gpt2/ one of {', '.join(SPLITS)}")
    typed = list(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    if unknown := {kind for _, kind in typed} - {NORMAL, CONTROL, USER_DEFINED, UNUSED}:
        raise ValueError(f"tokens of type {', '.join(map(str, sorted(unknown)))}")
    steps, normalizer = SPLITS[split]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }
            for i, (token, kind) in enumerate(typed)
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES | step for step in steps]},
        "post_processor": BYTES,
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, (token, kind) in enumerate(typed) if kind != UNUSED},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Mapping[str, Any], ids: Mapping[str, int | None]) -> dict[str, Any]:
    """A tokenizer_config.json with the special tokens and the chat template of the file."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{kind}_token": tokens[i] for kind, i in ids.items() if i is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def weights(reader: GGUFReader, fields: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in bf16 under Hugging Face's names. The table of embeddings is the head's where the file has both,
    which differ by their quantisation alone: the head's is the finer one."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    table = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    outer = {table: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    kind = fields["general.architecture"]
    heads = {"attn_q": fields[f"{kind}.attention.head_count"], "attn_k": fields[f"{kind}.attention.head_count_kv"]}
    for name, tensor in tensors.items():
        if name == "token_embd.weight" and table != name:
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in outer:
            yield outer[name], _bf16(values)
            continue
        block, layer, part, leaf = [*name.split("."), "", "", ""][:4]
        if block != "blk" or part not in TENSORS:
            raise ValueError(f"tensor {name} has no name in Hugging Face's form")
        if kind == "llama" and part in heads:
            values = halves(values, heads[part])
        yield f"model.layers.{layer}.{TENSORS[part]}.{leaf}", _bf16(values)


def halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys with the rotary dimensions in halves, as Hugging Face has them; a llama's GGUF file has
    them in pairs."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _bf16(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)
