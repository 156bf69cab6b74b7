"""Functions for the demo tasks: they write expressions with answers as the files of a data set, and a model small
enough for a CPU.

A task includes data, tokenizer and model config, so that a fresh clone trains without a download.
"""

import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.errors import UserError

Question = tuple[str, str]  # "12+7=", "19"
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
# model_type → the settings of a tiny model in which it differs from a Qwen3 of three layers
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], **LINEAR_ATTENTION},
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        **LINEAR_ATTENTION,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 16,  # which transformers takes for the dimensions that are rotated
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


def public_file(data: str | None, name: str) -> Path:
    """Return a file of the public data below `data` (default: $PTF_DATA, else ../shared/data). Raises UserError if it
    does not exist."""
    path = Path(data or os.environ.get("PTF_DATA") or "../shared/data") / name
    if not path.is_file():
        raise UserError(f"there is no {path}; set PTF_DATA (or the argument `data`) to a directory that has {name}")
    return path


def chat_row(question: Question) -> dict[str, Any]:
    """Return a question with its answer as a chat."""
    return {"messages": [{"role": "user", "content": question[0]}, {"role": "assistant", "content": question[1]}]}


def pair_rows(questions: Sequence[Question], seed: int) -> list[dict[str, Any]]:
    """Return preference rows: the right answer is chosen, and the same answer with one wrong digit is rejected."""
    rng, rows = random.Random(f"pairs/{seed}"), []
    for question, answer in questions:
        at = rng.choice([i for i, c in enumerate(answer) if c.isdigit()])
        wrong = rng.choice([d for d in "0123456789" if d != answer[at]])
        rows.append({"prompt": question, "chosen": answer, "rejected": answer[:at] + wrong + answer[at + 1 :]})
    return rows


def write_task(
    directory: str,
    *,
    train: Sequence[Question],
    prompts: Sequence[Question],
    dev: Sequence[Question],
    test: Sequence[Question],
    shuffle_answers: bool,
    seed: int,
    model_type: str = "qwen3",
) -> None:
    """Write the files of a task into a directory.

    These are `train.jsonl`, chats for SFT; `train_prompts.jsonl`, `dev.jsonl` and `test.jsonl`, prompts with reference
    answers; `held_out_chat.jsonl`, the questions of dev as chats, for a held-out loss; `train_pairs.jsonl` and
    `held_out_pairs.jsonl`, preferences for right answers over wrong ones; `train_scored.jsonl` and
    `held_out_scored.jsonl`, the same answers with rewards; `model/`, of the family `model_type` (`ARCHITECTURES`); and
    `small_model/`, a student for distillation.
    With `shuffle_answers`, the reference answers of the training prompts are permuted: a negative control, from which
    nothing can be learned.
    """
    root = Path(directory)
    if shuffle_answers:
        answers = [answer for _, answer in prompts]
        random.Random(f"shuffle_answers/{seed}").shuffle(answers)
        prompts = [(question, answer) for (question, _), answer in zip(prompts, answers, strict=True)]
    write_rows(root / "train.jsonl", map(chat_row, train))
    for name, questions in {"train_prompts": prompts, "dev": dev, "test": test}.items():
        rows = ({"messages": [{"role": "user", "content": text}], "answer": answer} for text, answer in questions)
        write_rows(root / f"{name}.jsonl", rows)
    write_rows(root / "held_out_chat.jsonl", map(chat_row, dev))
    for name, questions in (("train", train), ("held_out", dev)):
        pairs = pair_rows(questions, seed)
        write_rows(root / f"{name}_pairs.jsonl", pairs)
        scores = (
            {"prompt": pair["prompt"], "completion": pair[kind], "reward": float(kind == "chosen")}
            for pair in pairs
            for kind in ("chosen", "rejected")
        )
        write_rows(root / f"{name}_scored.jsonl", scores)
    alphabet = "".join(sorted({c for questions in (train, prompts, dev, test) for q in questions for c in q[0] + q[1]}))
    write_model(root / "model", alphabet, model_type=model_type)
    write_model(root / "small_model", alphabet, dim=64, layers=2)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a file of JSON lines; its directory is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(
    directory: Path,
    alphabet: str,
    *,
    dim: int = 128,
    layers: int = 3,
    max_length: int = 128,
    template: str | None = None,
    words: Sequence[str] = (),
    model_type: str = "qwen3",
) -> None:
    """Write the config of a model (without weights, for `model.init: random`) and a tokenizer with one id a character.

    A Qwen3 has 0.6 million parameters with the default sizes. Raises UserError for a family without an entry in
    `ARCHITECTURES`. `template` is a chat template of its own; each of
    `words` is one token.
    """
    from ptf.data.character_tokenizer import (
        character_tokenizer,  # 3 CPU-seconds, which a reward's process has no use for
    )

    if model_type not in ARCHITECTURES:
        raise UserError(f"model_type: {model_type} has no tiny model; there are {', '.join(ARCHITECTURES)}")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(alphabet, directory, words)
    if template is not None:
        tokenizer.hf.chat_template = template
        tokenizer.save(directory)
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    config = {
        "model_type": model_type,
        "torch_dtype": "float32",
        **ids,
        "vocab_size": -(-tokenizer.vocab_size // 8) * 8,
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_length,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        **ARCHITECTURES[model_type],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
