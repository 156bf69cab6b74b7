"""What `ptf plan` says of whole published models, beside the bytes that a step on fake tensors holds at once, and the
arithmetic of what is held all the time; what a sync to the engines moves. Writes results/plans.md.

    python benchmarks/plans.py

Exits 1 if a plan is not within 5 % of the count, or took more than 60 CPU-seconds. Nothing is measured on a GPU, and
nothing needs one.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks.flow_runs import commit, cpu, results_page
from benchmarks.pages import table, today, write_page
from ptf.config import loads
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.model import bridge
from ptf.model.quantised_weights import FORMS, quantised_weights
from ptf.rl.online_budget import sync_traffic
from ptf.train.budget import Budget, budget
from ptf.train.components import layer_factory_of
from tests.train.live_bytes import peak_of_a_step, published, raw_job

GIB = 2**30
BOUND, MOST_S = 0.05, 60
COLUMNS = (
    *("model", "job", "GPUs × GiB", "tokens", "checkpointing", "held", "gathered", "activations", "head", "plan"),
    *("counted", "plan is off by", "planned in, CPU-s", "B a parameter", "it", "held is"),
)
ADAPTERS = {"rank": 16, "targets": ["layers.*.attn.*_proj"]}


class Case(NamedTuple):
    """A job: a published shape, its GPUs and their memory in GiB, and settings."""

    shape: str
    gpus: int
    room: float
    seq_len: int
    checkpointing: str
    model: dict[str, Any] = {}
    recipe: str = "sft"
    contexts: int = 1  # GPUs that divide each sequence


CASES = [
    Case("Qwen3-0.6B", 1, 80, 8192, "none"),
    Case("Qwen3-4B", 1, 141, 8192, "selective"),
    Case("Qwen3-8B", 8, 80, 8192, "selective"),
    Case("Qwen3-8B", 1, 80, 8192, "block", {"lora": ADAPTERS}),
    Case("Qwen3-8B", 1, 24, 4096, "block", {"lora": ADAPTERS, "quantization": "nf4"}),
    Case("Qwen3-8B", 8, 80, 8192, "block", {"lora": ADAPTERS}, "dpo"),
    Case("Qwen3-32B", 8, 141, 8192, "block"),
    Case("Qwen3-30B-A3B", 8, 141, 8192, "block"),
    Case("Qwen3-235B-A22B", 256, 141, 8192, "block"),
    Case("gpt-oss-20b", 1, 24, 4096, "block", {"lora": ADAPTERS, "quantization": "mxfp4"}),
    Case("gpt-oss-20b", 8, 80, 8192, "block"),
    Case("Gemma-3-4B", 1, 141, 8192, "selective"),
    Case("Qwen3-8B", 64, 80, 262_144, "block", contexts=8),
    Case("Qwen3-8B", 64, 80, 1_048_576, "block", contexts=16),
    Case("Qwen3-8B", 64, 80, 1_048_576, "offload", contexts=8),
]


def measure(case: Case) -> tuple[Budget, int, float]:
    """Return a job's plan, the most bytes that a step of it holds, and the CPU-seconds of planning it."""
    two_passes = 2 * case.gpus // case.contexts
    changes = {
        "model": case.model,
        "train": {"activation_checkpointing": case.checkpointing, "global_batch_sequences": two_passes},
        "recipe": case.recipe,
        "compute": {"mesh": {"context_parallel_size": case.contexts}},
    }
    with published(case.shape) as directory:
        raw = raw_job(directory, case.gpus, seq_len=case.seq_len, sequences=1, **changes)
        job, began = loads(yaml.safe_dump(raw)), time.process_time()
        plan = budget(job, directory, case.gpus, room_gib=case.room)
        took = time.process_time() - began
        return plan, peak_of_a_step(job, directory, case.gpus), took


def arithmetic(case: Case, plan: Budget) -> str:
    """Return what weights, gradients and averages on one GPU are made of."""
    frozen = plan.parameters - plan.trained
    trained = f"16 B × {plan.trained / 1e9:.3g} G trained"
    if not frozen:
        return f"({trained}) / {case.gpus}"
    packed, bits = in_four_bits(case)
    four = f" + {bits:g} bits × {packed / 1e9:.3g} G in four bits" if packed else ""
    return f"({trained}{four} + 2 B × {(frozen - packed) / 1e9:.3g} G frozen) / {case.gpus}"


def in_four_bits(case: Case) -> tuple[int, float]:
    """Return the number of weights that a job holds in four bits, and the bits of each with its scale."""
    with published(case.shape) as directory:
        factory = layer_factory_of(ModelConfig(path=str(directory), **case.model), adapted=True)
        model = bridge.build(directory, factory=factory)
    weights = quantised_weights(model).values()
    bits = [4 + 8 * FORMS[weight.form].SCALE_BYTES / FORMS[weight.form].BLOCK for weight in weights]
    return sum(weight.shape.numel() for weight in weights), max(bits, default=0.0)


def syncs() -> list[list[str]]:
    """Return a row for each model and way to send it to the engines, in bf16: its bytes, and the least seconds."""
    lines = []
    for shape in ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"):
        with published(shape) as directory:
            whole = sum(p.numel() for p in bridge.build(directory).parameters())
            adapted = layer_factory_of(ModelConfig(path=str(directory), lora=LoraConfig(**ADAPTERS)), adapted=True)
            adapter = sum(p.numel() for p in bridge.build(directory, factory=adapted).parameters()) - whole
        for what, parameters, transports in (
            ("whole", whole, ("ipc", "nccl", "files", "object_store")),
            ("adapter", adapter, ("files", "object_store")),
        ):
            for transport in transports:
                found = sync_traffic(parameters, "bf16", transport)
                lines.append([shape, what, transport, f"{found.sent / GIB:.3g}", f"{found.seconds:.2g}"])
    return lines


def main() -> int:
    lines, missed = [], []
    for case in CASES:
        began = time.monotonic()
        plan, counted, took = measure(case)
        memory, off = plan.memory, plan.memory.total / counted - 1
        missed += [f"{case.shape} {off:+.1%}, {took:.0f} s"] * (abs(off) > BOUND or took > MOST_S)
        divided = f"context {case.contexts}" if case.contexts > 1 else ""
        words = (case.recipe, "LoRA" if case.model else "", case.model.get("quantization", ""), divided)
        job = ", ".join(word for word in words if word)
        held = memory.weights + memory.gradients + memory.optimizer
        parts = (held, memory.gathered, memory.activations, memory.logits, memory.total, counted)
        sizes = [f"{part / GIB:.2f}" for part in parts]
        each = memory.total * case.gpus / plan.parameters
        fits = "fits" if plan.fits else "does not fit"
        setting = [case.shape, job, f"{case.gpus} × {case.room:g}", f"{case.seq_len:,}", case.checkpointing]
        lines.append([*setting, *sizes, f"{off:+.1%}", f"{took:.1f}", f"{each:.3g}", fits, arithmetic(case, plan)])
        print(*lines[-1], f"{time.monotonic() - began:.0f} s", flush=True)
    return write_page(results_page("plans.md"), page(lines), [], missed)


def page(lines: list[list[str]]) -> str:
    return f"""# Memory of whole published models

Command: `python benchmarks/plans.py` (`make bench-plans`)  
Counted on fake tensors ({cpu()}, commit {commit()}, {today()}); nothing here was measured on a GPU.

Two passes of one packed sequence each, in bf16. GiB on one GPU at the fullest moment of a step. *Held*: weights,
gradients and AdamW's averages, whose arithmetic is in the last column: 4 bytes of weight, 4 of gradient and 8 of
averages for a parameter that trains. *Gathered*: what FSDP gathers and reduces. *Counted*: the most bytes that a step
of the real Trainer holds, by storage; norms, gates and rotary embeddings are traced by torch.compile, and saved of
them is what Inductor's partitioner saves. *B a parameter*: of all GPUs together. *Context n*: n GPUs have a part of
each sequence (`compute.mesh.context_parallel_size`). Attention over 1,048,576 tokens takes 19 times the FLOPs of the
rest: such a step is planned, and rarely wanted.

{table(COLUMNS, lines)}

## Weights to the engines, each step

The bytes of a sync in bf16, and the time that its slowest link takes at least (`ptf plan` of an online job). *Adapter*:
LoRA of rank {ADAPTERS["rank"]} on the projections of attention, `rollout.lora_sync: adapter`.

{table("model | what | transport | GiB | seconds, at least", syncs())}
"""


if __name__ == "__main__":
    sys.exit(main())
