"""Packed SFT at the shapes of published models, with random weights, through `ptf train`: tokens a second, MFU and peak
memory of one GPU. Prints a table, and a JSON line a shape.

    python benchmarks/gpu_sft.py [--shapes Qwen3-0.6B …] [--seq-len 8192] [--rows 1] [--steps 20] [--fused …]
        [--device cuda]

Documents have log-normal lengths (median 180, 99th percentile about 2,000); bf16 compute over fp32 master weights,
AdamW. `--device cpu` is for trying the benchmark itself: its figures say nothing about a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.published_shapes import SHAPES, write_config  # noqa: E402
from ptf.data.character_tokenizer import character_tokenizer  # noqa: E402

CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
WARM_UP = 3  # steps that are not measured: the first compile
# a model that a CPU trains in a second, for --device cpu
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 128, "vocab_size": 512}
LIMIT_S = 540.0  # of one shape


def write_documents(file: Path, tokens: int, longest: int) -> None:
    """Write rows of random letters, with log-normal lengths, until there are so many tokens; a letter is a token."""
    rng = np.random.default_rng(0)
    letters = np.array(list(CHARACTERS))
    written = 0
    with file.open("w") as out:
        while written < tokens:
            length = int(np.clip(rng.lognormal(np.log(180), 1.03), 8, longest))
            out.write(json.dumps({"text": "".join(rng.choice(letters, length))}) + "\n")
            written += length


def job(directory: Path, shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Write the model's config, tokenizer and data to a directory, and return the job."""
    steps, tiny = WARM_UP + given.steps, given.device == "cpu"
    character_tokenizer(CHARACTERS, directory / "model")
    write_config(shape, directory / "model", **(TINY if tiny else {}))
    write_documents(directory / "train.jsonl", 2 * steps * given.rows * given.seq_len, given.seq_len // 4)
    return {
        "recipe": "sft",
        "output": str(directory / "runs"),
        "model": {"path": str(directory / "model"), "init": "random"},
        "data": {
            "seq_len": given.seq_len,
            "sources": {"letters": {"path": str(directory / "train.jsonl"), "kind": "text"}},
        },
        "train": {
            "steps": steps,
            "lr": 1e-5,
            "global_batch_sequences": given.rows,
            "micro_batch_sequences": given.rows,
            "precision": "bf16",
            "activation_checkpointing": given.checkpointing,
            "fused": "auto" if given.fused is None else given.fused,
        },
        "compute": {"launcher": "local", "device": given.device},
        "checkpoint": {"every": 10 * steps},
        "track": {"tensorboard": False, "print_every": steps},
    }


def computes_with(said: str) -> str:
    """Return the attention and the kernels that a run's first lines name."""
    return next(line.partition("attention=")[2] for line in said.splitlines() if "attention=" in line)


def measure(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train as a user would, and return the medians of the measured steps. Raises SystemExit if training fails."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "job.yaml").write_text(json.dumps(job(directory, shape, given)))  # JSON is YAML
        command = [sys.executable, "-m", "ptf.cli", "train", str(directory / "job.yaml"), "--run-name", "bench"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{shape}: ptf train failed\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (directory / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP:]
    return {
        "shape": shape,
        "seq_len": given.seq_len,
        "rows": given.rows,
        "checkpointing": given.checkpointing,
        "computes_with": computes_with(done.stdout),
        "steps": len(rows),
        "tokens_per_s": round(median(row["tokens_per_s"] for row in rows)),
        "mfu": round(median(row["mfu"] for row in rows), 4),
        "step_s": round(median(row["step_s"] for row in rows), 4),
        "spread_s": [round(pick(row["step_s"] for row in rows), 4) for pick in (min, max)],
        "peak_gib": round(max(row["peak_memory_gib"] for row in rows), 2),
    }


def device_name(device: str) -> str:
    """Return the name of the device; raise SystemExit if there is no GPU and one is asked for."""
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_sft.py needs a GPU; torch sees none")
    return torch.cuda.get_device_name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"], choices=list(SHAPES))
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", default="none", choices=["none", "selective", "block"])
    parser.add_argument("--fused", nargs="*", choices=["flash_attn", "liger_kernel"], help="default: what is installed")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args()
    name, found = device_name(given.device), []
    for shape in given.shapes:
        found.append({"device": name, **measure(shape, given)})
        print(json.dumps(found[-1]), flush=True)
    print("\n| shape | tokens/s | MFU | step, s | peak, GiB |\n|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['shape']} | {row['tokens_per_s']:,} | {row['mfu']:.1%} | {row['step_s']:.3f} "
            f"| {row['peak_gib']:.1f} |"
        )


if __name__ == "__main__":
    main()
