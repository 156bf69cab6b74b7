"""The memory of a GPU while it trains, beside what `ptf plan` says of the job."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.run import run
from ptf.train.budget import budget
from tests.tiny import arithmetic, configured, write_jsonl

GIB = 2**30
# a hundred million parameters; on a CPU, where only the test itself is tried, a few
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 32_000}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CHANGES = {
    "whole": {},
    "LoRA": {"model": {"lora": {"rank": 16}}},
    "NF4": {"model": {"lora": {"rank": 16}, "quantization": "nf4"}},
    "8 bits": {"train": {"optimizer": "adamw_8bit"}},
    "selective": {"train": {"activation_checkpointing": "selective"}},
    "offload": {"train": {"activation_checkpointing": "offload", "optimizer": "adamw_offload"}},
}


def digits(file: Path, longest: int) -> dict[str, str]:
    """Write documents of digits, of which all positions are trained; return them as a source."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 20, longest, 100)
    write_jsonl(file, [{"text": "".join(map(str, rng.integers(0, 10, length)))} for length in lengths])
    return {"path": str(file), "kind": "text"}


@pytest.mark.parametrize("case", CHANGES)
def test_a_step_takes_the_memory_that_was_planned(tmp_path: Path, device: str, case: str) -> None:
    if case in ("NF4", "8 bits"):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    raw = arithmetic(tmp_path)
    model = Path(raw["model"]["path"])
    sizes = LARGE if device == "cuda" else SMALL
    width = {"max_position_embeddings": 4096, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    configured(model, **sizes | width)
    # the plan counts what torch.compile saves, and not on Liger's kernels, which write gradients in place
    train = {"steps": 3, "precision": "bf16", "micro_batch_sequences": 2, "validate_every": 0, "fused": []}
    changes = CHANGES[case]
    seq_len = 2048 if device == "cuda" else 64
    raw["data"] = {"seq_len": seq_len, "sources": {"digits": digits(tmp_path / "digits.jsonl", seq_len * 3 // 4)}}
    raw["train"] = {**raw["train"], **train, **changes.get("train", {})}
    raw["model"] = {**raw["model"], **changes.get("model", {})}
    raw["compute"]["device"] = device
    job = loads(yaml.safe_dump(raw))
    planned = budget(job, model, 1).memory.total / GIB
    rows = read_metrics(run(job, "a") / "metrics.jsonl")
    peak = max(row["peak_memory_gib"] for row in rows[1:])
    assert planned > 0
    if device == "cuda":  # the memory of a process on a CPU is another thing
        assert 0.85 * planned <= peak <= 1.05 * planned + 0.1  # cuBLAS has a workspace
