"""Tiny real models and data that tests share."""

import json
from pathlib import Path

import numpy as np
import torch
import yaml

from ptf.data.batch import Batch
from ptf.data.document import Document

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
}


def checkpoint(directory: Path, *, tied: bool = True, seed: int = 0, **changes: object) -> Path:
    """A Qwen3 checkpoint that transformers made, with norms away from 1 so that no test passes by their being there."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": tied, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.2) if name.endswith("norm.weight") else parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    return directory


def sample(length: int, seed: int, vocab: int = SIZES["vocab_size"], trained: float = 0.6) -> Document:
    rng = np.random.default_rng(seed)
    weights = (np.arange(length) >= length * (1 - trained)).astype(np.float32)
    return Document(rng.integers(0, vocab, length).astype(np.int32), weights, "a")


def packed(sequences: list[list[int]], seq_len: int, seed: int = 0) -> Batch:
    """A batch of sequences of documents of these lengths."""
    return Batch.of(
        [
            [(sample(n, seed * 1000 + 10 * r + i),) for i, n in enumerate(lengths)]
            for r, lengths in enumerate(sequences)
        ],
        seq_len,
    )


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def job_file(raw: dict, directory: Path) -> str:
    """Write a job as YAML; return its path."""
    (directory / "job.yaml").write_text(yaml.safe_dump(raw))
    return str(directory / "job.yaml")


def configured(directory: Path, **changes: object) -> Path:
    """Change settings of a checkpoint's config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def codes(*levels: int) -> list[str]:
    """Tokens of semantic ids: <a_0> …, <b_0> …, as many as each level has codes."""
    return [f"<{letter}_{code}>" for letter, size in zip("abc", levels, strict=False) for code in range(size)]


def arithmetic(directory: Path, *, rows: int = 200) -> dict:
    """Sums as chats, a character tokenizer and a model config in `directory`; the raw job that trains on them."""
    from ptf.data.character_tokenizer import character_tokenizer

    tokenizer = character_tokenizer("0123456789+-=", directory / "model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SIZES,
        "vocab_size": tokenizer.vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.stop_ids[0],
        "hidden_act": "silu",
    }
    (directory / "model" / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    pairs = rng.integers(1, 30, (rows + 20, 2)).tolist()
    asked = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    chats = [
        {"messages": [*m, {"role": "assistant", "content": str(a + b)}]} for m, (a, b) in zip(asked, pairs, strict=True)
    ]
    prompts = [{"messages": m, "answer": str(a + b)} for m, (a, b) in zip(asked, pairs, strict=True)]
    write_jsonl(directory / "train.jsonl", chats[:rows])
    write_jsonl(directory / "held_out.jsonl", chats[rows:])
    write_jsonl(directory / "prompts.jsonl", prompts)
    sources, held_out = ({"path": str(directory / f"{name}.jsonl")} for name in ("train", "held_out"))
    return small_job(directory, {"sums": sources}, {"held_out": held_out})


def small_job(directory: Path, sources: dict, validation: dict, model: Path | None = None) -> dict:
    """A raw job of twelve steps on a CPU, from random weights of the model in `directory`."""
    return {
        "recipe": "sft",
        "output": str(directory / "runs"),
        "seed": 1,
        "model": {"path": str(model or directory / "model"), "init": "random"},
        "data": {
            "sources": sources,
            "validation": validation,
            "partitions": 4,
            "seq_len": 64,
            "shuffle_buffer": 16,
        },
        "train": {
            "steps": 12,
            "lr": 1e-3,
            "global_batch_sequences": 4,
            "micro_batch_sequences": 2,
            "precision": "fp32",
            "validate_every": 4,
        },
        "compute": {"launcher": "local", "device": "cpu", "threads": 1},
        "checkpoint": {"every": 5},
        "track": {"tensorboard": False},
    }


def online(raw: dict, directory: Path, reward: str = "tests.rl.plugs:by_length", **rollout: object) -> dict:
    """The job of `arithmetic` as GRPO of its prompts, whose responses the native engine samples; the arguments are
    the keys of the section rollout that differ."""
    prompts = {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}
    usual = {"engine": "native", "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}
    return {
        **raw,
        "recipe": "grpo",
        "data": {**raw["data"], "sources": {"p": prompts}, "validation": {}},
        "train": {**raw["train"], "validate_every": 0},
        "rollout": {**usual, **({"reward": {"use": reward}} if reward else {}), **rollout},
    }
