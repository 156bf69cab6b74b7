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
    "experts": ("Qwen3-30B-A3B", 8, {"num_hidden_layers": 2}, {"seq_len": 4096, "sequences": 1}),
    "DPO": ("Qwen3-0.6B", 2, {"num_hidden_layers": 4}, {"seq_len": 4096, "sequences": 1, "recipe": "dpo"}),
    "reward model": ("Qwen3-0.6B", 2, {"num_hidden_layers": 4}, {"seq_len": 4096, "sequences": 1, "recipe": "rm"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_holds_what_was_planned(case: str) -> None:
    shape, ranks, changes, more = CASES[case]
    with published(shape, **changes) as directory:
        job = loads(yaml.safe_dump(raw_job(directory, ranks, **more)))
        counted = peak_of_a_step(job, directory, ranks)
        planned = budget(job, directory, ranks).memory
    assert planned.total == pytest.approx(counted, rel=0.05), (planned.total / GIB, counted / GIB, planned)


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
