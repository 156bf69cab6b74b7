"""What `ptf plan` says a GPU needs, beside the bytes that are counted while the Trainer steps on fake tensors."""

from typing import Any

import pytest
import yaml

from ptf.config import loads
from ptf.train.budget import budget
from tests.train.live_bytes import peak_of_a_step, published, raw_job

GIB = 2**30
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    # shape, ranks, changes of the shape, of the job
    "whole, at the head": ("Qwen3-0.6B", 1, {"num_hidden_layers": 4}, {"seq_len": 2048, "sequences": 1}),
    "8 ranks": ("Qwen3-8B", 8, {"num_hidden_layers": 3}, {"seq_len": 4096, "sequences": 1}),
    "64 ranks, blocks": (
        "Qwen3-8B",
        64,
        {"num_hidden_layers": 3},
        {"seq_len": 8192, "sequences": 1, "train": {"activation_checkpointing": "block"}},
    ),
    "selective, in a layer": (
        "Qwen3-8B",
        8,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {"seq_len": 4096, "sequences": 2, "train": {"activation_checkpointing": "selective"}},
    ),
    "moments in 8 bits": (
        "Qwen3-0.6B",
        2,
        {"num_hidden_layers": 4},
        {"seq_len": 2048, "sequences": 1, "train": {"optimizer": "adamw_8bit"}},
    ),
    "moments in 8 bits, in the step": (
        "Qwen3-4B",
        8,
        {"num_hidden_layers": 6, "vocab_size": 1024},
        {"seq_len": 256, "sequences": 1, "train": {"optimizer": "adamw_8bit"}},
    ),
    "LoRA": (
        "Qwen3-4B",
        2,
        {"num_hidden_layers": 4},
        {"seq_len": 4096, "sequences": 1, "model": {"lora": {"rank": 16}}},
    ),
    "LoRA of NF4": (
        "Qwen3-4B",
        2,
        {"num_hidden_layers": 4},
        {"seq_len": 4096, "sequences": 1, "model": {"lora": {"rank": 16}, "quantization": "nf4"}},
    ),
    "LoRA of MXFP4": (
        "gpt-oss-20b",
        1,
        {"num_hidden_layers": 3},
        {"seq_len": 4096, "sequences": 1, "model": {"lora": {"rank": 16}, "quantization": "mxfp4"}},
    ),
    "DPO of NF4": (
        "Qwen3-4B",
        2,
        {"num_hidden_layers": 4},
        {
            "seq_len": 4096,
            "sequences": 1,
            "recipe": "dpo",
            "model": {"lora": {"rank": 16}, "quantization": "nf4"},
        },
    ),
    "in an MLP, blocks": (
        "Qwen3-8B",
        64,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {"seq_len": 8192, "sequences": 1, "train": {"activation_checkpointing": "block"}},
    ),
    "experts": ("Qwen3-30B-A3B", 8, {"num_hidden_layers": 2}, {"seq_len": 4096, "sequences": 1}),
    "experts, blocks": (
        "Qwen3-30B-A3B",
        8,
        {"num_hidden_layers": 3},
        {"seq_len": 8192, "sequences": 2, "train": {"activation_checkpointing": "block"}},
    ),
    "LoRA beside experts": (
        "gpt-oss-20b",
        2,
        {"num_hidden_layers": 3},
        {"seq_len": 4096, "sequences": 1, "model": {"lora": {"rank": 16, "targets": ["layers.*.attn.*_proj"]}}},
    ),
    "whole, many tokens": (
        "Qwen3-0.6B",
        1,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {"seq_len": 8192, "sequences": 4},
    ),
    "whole, many tokens, not compiled": (
        "Qwen3-0.6B",
        1,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {"seq_len": 8192, "sequences": 4, "train": {"compile": False}},
    ),
    "selective, not compiled": (
        "Qwen3-8B",
        8,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {"seq_len": 4096, "sequences": 2, "train": {"activation_checkpointing": "selective", "compile": False}},
    ),
    "Gemma's norms": ("Gemma-3-4B", 1, {"num_hidden_layers": 6}, {"seq_len": 8192, "sequences": 1}),
    "DPO": ("Qwen3-0.6B", 2, {"num_hidden_layers": 4}, {"seq_len": 4096, "sequences": 1, "recipe": "dpo"}),
    "context 2 of 2, selective": (
        "Qwen3-8B",
        2,
        {"num_hidden_layers": 4, "vocab_size": 8192},
        {
            "seq_len": 8192,
            "sequences": 1,
            "train": {"activation_checkpointing": "selective"},
            "compute": {"mesh": {"context_parallel_size": 2}},
        },
    ),
    "context 8 of 16, more than key-value heads": (
        "Qwen3-4B",
        16,
        {"num_hidden_layers": 4, "num_key_value_heads": 2},
        {"seq_len": 32768, "sequences": 1, "compute": {"mesh": {"context_parallel_size": 8}}},
    ),
    "context 8 of 64, blocks": (
        "Qwen3-8B",
        64,
        {"num_hidden_layers": 4},
        {
            "seq_len": 131072,
            "sequences": 1,
            "train": {"activation_checkpointing": "block"},
            "compute": {"mesh": {"context_parallel_size": 8}},
        },
    ),
    "reward model": ("Qwen3-0.6B", 2, {"num_hidden_layers": 4}, {"seq_len": 4096, "sequences": 1, "recipe": "rm"}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_step_holds_what_was_planned(case: str) -> None:
    shape, ranks, changes, more = CASES[case]
    with published(shape, **changes) as directory:
        job = loads(yaml.safe_dump(raw_job(directory, ranks, **more)))
        counted = peak_of_a_step(job, directory, ranks)
        planned = budget(job, directory, ranks).memory
    assert planned.total == pytest.approx(counted, rel=0.05), (planned.total / GIB, counted / GIB, planned)


@pytest.mark.long
def test_a_step_that_is_compiled_holds_less_than_one_that_is_not() -> None:
    """The negative control of the cases above: they compile what a GPU does."""
    shape, ranks, changes, more = CASES["whole, many tokens"]
    with published(shape, **changes) as directory:
        raw = raw_job(directory, ranks, **more)
        counted = peak_of_a_step(loads(yaml.safe_dump(raw)), directory, ranks)
        raw["train"]["compile"] = False
        planned = budget(loads(yaml.safe_dump(raw)), directory, ranks).memory
    assert planned.total > 1.3 * counted


def test_the_plan_of_qwen3_0p6b_is_what_a_gpu_allocated() -> None:
    # NVIDIA H200, torch 2.13: the most that was allocated in a run of `ptf train`, in any step; packed SFT in bf16,
    # 4 sequences of 8,192 tokens a pass, all trained, no activation checkpointing, FlexAttention, parts compiled
    measured = 51.2 * GIB
    with published("Qwen3-0.6B") as directory:
        raw = raw_job(directory, 1, seq_len=8192, sequences=4)
        found = budget(loads(yaml.safe_dump(raw)), directory, 1)
        raw["train"]["compile"] = False
        eager = budget(loads(yaml.safe_dump(raw)), directory, 1)
    assert found.memory.total == pytest.approx(measured, rel=0.05)
    assert eager.memory.total > 1.4 * measured, "negative control"


@pytest.mark.long
def test_inputs_of_layers_in_host_memory_save_what_was_planned() -> None:
    changes, found = {"num_hidden_layers": 9, "vocab_size": 1024}, []
    with published("Qwen3-0.6B", **changes) as directory:
        for mode in ("block", "offload"):
            raw = raw_job(directory, 2, seq_len=8192, sequences=1, train={"activation_checkpointing": mode})
            job = loads(yaml.safe_dump(raw))
            found.append((peak_of_a_step(job, directory, 2), budget(job, directory, 2).memory.total))
    (counted, planned), (counted_offloaded, planned_offloaded) = found
    assert planned - planned_offloaded == pytest.approx(counted - counted_offloaded, rel=0.15)
    assert counted - counted_offloaded > 0.05 * counted


def test_adapters_beside_the_experts_of_gpt_oss_20b_fit_20_gb() -> None:
    changes = {"lora": {"rank": 16, "targets": ["layers.*.attn.*_proj"]}, "quantization": "mxfp4"}
    with published("gpt-oss-20b") as directory:
        raw = raw_job(directory, 1, seq_len=4096, sequences=1, model=changes)
        raw["train"]["activation_checkpointing"] = "block"
        found = budget(loads(yaml.safe_dump(raw)), directory, 1, room_gib=24.0)
    # 32 experts of 3 matrices of 2,880 × 2,880 in each of 24 layers, at 4.25 bits
    experts = 24 * 32 * 3 * 2880**2
    others = found.parameters - found.trained - experts
    assert found.memory.weights == pytest.approx(4.25 / 8 * experts + 2 * others + 4 * found.trained, rel=1e-3)
    assert found.memory.total <= 20e9
    assert found.fits
    plain = raw | {"model": {key: value for key, value in raw["model"].items() if key != "quantization"}}
    with published("gpt-oss-20b") as directory:
        plain["model"]["path"] = str(directory)
        whole = budget(loads(yaml.safe_dump(plain)), directory, 1, room_gib=24.0)
    assert whole.memory.total > 40e9, "negative control"


def test_the_host_holds_what_is_offloaded() -> None:
    with published("Qwen3-0.6B", num_hidden_layers=4) as directory:
        raw = raw_job(directory, 2, seq_len=2048, sequences=3)
        plain = budget(loads(yaml.safe_dump(raw)), directory, 2)
        offload = {"optimizer": "adamw_offload", "activation_checkpointing": "offload"}
        raw["train"] |= offload
        found = budget(loads(yaml.safe_dump(raw)), directory, 2)
    assert plain.host == 0
    inputs = 4 * 3 * 2048 * 1024 * 2  # of four layers, in bf16
    assert found.host == plain.memory.optimizer + inputs
    assert found.memory.optimizer < plain.memory.optimizer
