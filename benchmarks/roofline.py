"""The upper bound of MFU of packed SFT at the shapes of published models, on H200s, with full sequences of 8k and 32k
tokens (`ptf plan --roofline`; nothing is measured on a GPU). Writes results/roofline.md.

    python benchmarks/roofline.py
"""

import json
import sys
import tempfile
from pathlib import Path

from flow_runs import results_page
from pages import table, write_page
from published_shapes import write_config

from ptf.config import Job, loads
from ptf.errors import UserError
from ptf.train.budget import budget
from ptf.train.roofline import Roofline, roofline

GPU, MEMORY_GIB = "H200", 141.0
# shape → GPUs, and the MFU that is aimed at for 8k tokens
CASES = {
    "Qwen3-0.6B": (1, 0.38),
    "Qwen3-4B": (1, 0.48),
    "Qwen3-8B": (8, 0.50),
    "Qwen3-32B": (8, None),
    "Qwen3-30B-A3B": (8, 0.30),
    "Gemma-3-4B": (1, 0.42),
    "Llama-3.2-1B": (1, None),
    "gpt-oss-20b": (8, 0.30),
}
PASSES = 4  # of gradient accumulation
MODES = ("none", "selective", "block")


def job(directory: Path, gpus: int, width: int, sequences: int, mode: str) -> Job:
    """Return a job of packed SFT."""
    raw = {
        "recipe": "sft",
        "output": "runs",
        "model": {"path": str(directory)},
        "data": {"seq_len": width, "sources": {"documents": {"path": "documents.jsonl", "kind": "text"}}},
        "train": {
            "steps": 1,
            "lr": 1e-5,
            "global_batch_sequences": PASSES * gpus * sequences,
            "micro_batch_sequences": sequences,
            "activation_checkpointing": mode,
        },
    }
    return loads(json.dumps(raw))


def best(directory: Path, gpus: int, width: int) -> tuple[str, int, float, Roofline] | None:
    """Return mode, sequences a pass, GiB and bound of the setting with the highest bound that fits, or None."""
    found = []
    for mode in MODES:
        for sequences in (1, 2, 4):
            one = job(directory, gpus, width, sequences, mode)
            try:
                plan = budget(one, directory, gpus, room_gib=MEMORY_GIB, gpu=GPU)
            except UserError:
                continue
            if plan.fits:
                found.append((mode, sequences, plan.memory.total / 2**30, roofline(one, directory, gpus, GPU)))
    return max(found, key=lambda one: one[3].mfu, default=None)


NAMES = "model | GPUs | tokens each | checkpointing | sequences a pass | GiB, plan | MFU at most | aim"


def page(lines: list[list[object]]) -> str:
    return f"""# Upper bounds of MFU

Command: `python benchmarks/roofline.py` (`make bench-roofline`)  
Nothing here was measured on a GPU.

Packed SFT in bf16 on {GPU}s, {PASSES} passes a step, all tokens trained, log-normal documents (median 180, σ 1.03),
norms, gates and rotary compiled. For each model, the mode of activation checkpointing and the sequences a pass with the
highest bound among those whose plan fits {MEMORY_GIB:g} GiB.

Each operator takes the largest of its FLOPs at 72 % of 989 TFLOP/s, its bytes at 85 % of 4.8 TB/s, and 2 µs; attention
takes its kept pairs at 0.5 (forward) and 0.4 (backward) of the peak; collectives take 80 % of 450 GB/s, and count where
they take longer than the computation of their pass. Clipping and AdamW are included.

{table(f"{NAMES} | three largest costs", lines)}
"""


def main() -> int:
    lines, missed = [], []
    for shape, (gpus, aim) in CASES.items():
        for width in (8192, 32_768):
            with tempfile.TemporaryDirectory() as scratch:
                one = best(write_config(shape, Path(scratch)), gpus, width)
            if one is None:
                lines.append([shape, gpus, f"{width:,}", f"does not fit {MEMORY_GIB:g} GiB", *[""] * 5])
                continue
            mode, sequences, gib, bound = one
            aimed = f"{aim:.0%}" if aim and width == 8192 else ""
            missed += [shape] * (bool(aimed) and bound.mfu < (aim or 0.0))
            three = ", ".join(
                f"{name} {seconds / bound.seconds:.0%}" for name, seconds in list(bound.operators.items())[:3]
            )
            setting = [shape, gpus, f"{width:,}", mode, sequences]
            lines.append([*setting, f"{gib:.0f}", f"{bound.mfu:.1%}", aimed, three])
            print(*lines[-1], flush=True)
    return write_page(results_page("roofline.md"), page(lines), [], missed)


if __name__ == "__main__":
    sys.exit(main())
