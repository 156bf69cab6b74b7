"""What benchmarks/train_step.py compares: the models, the settings of each peer, the rounds that are kept, and beside
which of them ptf is set."""

import json
from statistics import median
from typing import Any

from flow_runs import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "train_step.md"
KEPT = RESULTS.with_suffix(".jsonl")
WIDTH, LR = 2048, 1e-4
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": WIDTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
PAD = 0  # with which peers fill up; no document has it
HEADS = f"{SHAPE['num_attention_heads']} query and {SHAPE['num_key_value_heads']} key heads of {SHAPE['head_dim']}"
MODELS = {"small4": SHAPE | {"vocab_size": 4096}, "bigvocab": SHAPE | {"vocab_size": 151_936}}
# sequences a step; timed steps. Two steps of the same shapes come before them untimed: the first touches memory,
# compiles and ends with AdamW's state, beside which the second looks for memory once more
SEQUENCES, STEPS, WARM = {"small4": 4, "bigvocab": 1}, {"small4": 1, "bigvocab": 1}, 2
TRL, LOOP = "benchmarks/peers/trl_sft.py", "benchmarks/peers/hf_sft.py"
TRAINER, RESPONSES = "benchmarks/peers/hf_trainer.py", "benchmarks/peers/hf_responses.py"
BOTH, SMALL, LARGE = tuple(MODELS), ("small4",), ("bigvocab",)
ONE_ROW = "TRL, packed, 1 row a pass"
# peer, how the documents of a pass lie, sequences or documents a pass (the others are accumulated), attention, compiled
# by torch, Liger's kernels, models. `bigvocab` has one sequence a step, whose four documents are a pass without padding
# too; what a library refuses, it refuses whatever the vocabulary; a loop that makes the logits of responses alone gains
# little where they are few.
GRID: dict[str, tuple[str, str, int, str, bool, bool, tuple[str, ...]]] = {
    "TRL, packed, 4 rows a pass": (TRL, "packed", 4, "sdpa", False, False, SMALL),
    "TRL, packed, 2 rows a pass": (TRL, "packed", 2, "sdpa", False, False, SMALL),
    ONE_ROW: (TRL, "packed", 1, "sdpa", False, False, BOTH),
    "TRL, padding-free, 8 documents a pass": (TRL, "padding-free", 8, "sdpa", False, False, SMALL),
    "TRL, padding-free, 4 documents a pass": (TRL, "padding-free", 4, "sdpa", False, False, SMALL),
    "TRL, a document a pass": (TRL, "documents", 1, "sdpa", False, False, BOTH),
    "TRL, packed, 1 row a pass, eager attention": (TRL, "packed", 1, "eager", False, False, SMALL),
    "TRL, a document a pass, eager attention": (TRL, "documents", 1, "eager", False, False, SMALL),
    "TRL, packed, 1 row a pass, flex attention": (TRL, "packed", 1, "flex_attention", False, False, SMALL),
    "TRL, a document a pass, compiled": (TRL, "documents", 1, "sdpa", True, False, SMALL),
    "TRL, a document a pass, Liger": (TRL, "documents", 1, "sdpa", False, True, SMALL),
    "Trainer, packed, 1 row a pass": (TRAINER, "packed", 1, "sdpa", False, False, BOTH),
    "Trainer, a document a pass": (TRAINER, "documents", 1, "sdpa", False, False, BOTH),
    "transformers, packed, 4 rows a pass": (LOOP, "packed", 4, "sdpa", False, False, SMALL),
    "transformers, packed, 2 rows a pass": (LOOP, "packed", 2, "sdpa", False, False, SMALL),
    "transformers, packed, 1 row a pass": (LOOP, "packed", 1, "sdpa", False, False, BOTH),
    "transformers, padding-free, 8 documents a pass": (LOOP, "padding-free", 8, "sdpa", False, False, SMALL),
    "transformers, padding-free, 4 documents a pass": (LOOP, "padding-free", 4, "sdpa", False, False, SMALL),
    "transformers, a document a pass": (LOOP, "documents", 1, "sdpa", False, False, BOTH),
    "transformers, packed, 1 row a pass, eager attention": (LOOP, "packed", 1, "eager", False, False, SMALL),
    "transformers, a document a pass, eager attention": (LOOP, "documents", 1, "eager", False, False, SMALL),
    "transformers, packed, 1 row a pass, flex attention": (LOOP, "packed", 1, "flex_attention", False, False, SMALL),
    "transformers, packed, 1 row a pass, compiled": (LOOP, "packed", 1, "sdpa", True, False, BOTH),
    "transformers, a document a pass, compiled": (LOOP, "documents", 1, "sdpa", True, False, BOTH),
    "transformers, a document a pass, Liger": (LOOP, "documents", 1, "sdpa", False, True, SMALL),
    "loop, a document a pass": (RESPONSES, "documents", 1, "sdpa", False, False, LARGE),
    "loop, a document a pass, compiled": (RESPONSES, "documents", 1, "sdpa", True, False, LARGE),
}
# the fastest settings of each peer, and TRL at one row a pass, again with variables of glibc by which a process keeps
# what it frees; a run of ptf does that itself (ptf/compute/world.py)
KEPT_HEAP, AS_IT_IS = ", heap kept", "as glibc has it"
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
OF_HEAP = (
    f"*Heap kept*: with glibc's\n{' and '.join(f'`{name}={value}`' for name, value in HEAP.items())}, by which a "
    "process keeps what it frees, as one of ptf does by itself."
)
GRID |= {
    system + KEPT_HEAP: GRID[system]
    for system in (
        ONE_ROW,
        "TRL, a document a pass",
        "TRL, a document a pass, eager attention",
        "Trainer, a document a pass",
        "transformers, a document a pass",
        "transformers, a document a pass, eager attention",
        "transformers, packed, 1 row a pass, compiled",
        "transformers, a document a pass, compiled",
        "loop, a document a pass",
        "loop, a document a pass, compiled",
    )
}
LIBRARIES = ("TRL", "Trainer", "transformers")
PEERS = {
    "TRL": ("TRL",),
    "TRL, Trainer, transformers": LIBRARIES,
    "these, and a loop with the logits of responses alone": (*LIBRARIES, "loop"),
}
OURS: dict[str, dict[str, Any]] = {"ptf": {"train": {}}, "ptf, train.compile: true": {"train": {"compile": True}}}
NAMES = ("script", "form", "pass", "attention", "compile", "liger")
CELLS = OURS | {system: dict(zip(NAMES, cell, strict=False)) for system, cell in GRID.items()}
APART = {"fp32": 1e-4, "bf16": 5e-3}  # the most that losses of the same step may differ by


def rate(one: dict[str, Any]) -> float:
    """Real tokens per CPU-second."""
    return sum(one["tokens"]) / sum(one["cpu_s"])


def settings(name: str, system: str) -> dict[str, Any]:
    """All that the rounds of a system on a model have in common; rounds of other settings count for nothing."""
    return {
        "shape": MODELS[name],
        "width": WIDTH,
        "sequences": SEQUENCES[name],
        "steps": [WARM, STEPS[name]],
        "cell": CELLS[system],
    }


def kept(name: str, dtype: str, hardware: str, code: str | None = None) -> list[dict[str, Any]]:
    """The rounds that were made of a model and a dtype on such a CPU, with today's settings and this code of ptf, or
    that of the last round: what is compared was measured by turns."""
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    found = [
        row
        for row in rows
        if (row["model"], row["dtype"], row["hardware"]) == (name, dtype, hardware)
        and row["system"] in CELLS
        and row.get("settings") == settings(name, row["system"])
    ]
    code = code or (found[-1].get("code") if found else None)
    return [row for row in found if row.get("code") == code]


def planned(name: str, dtype: str, hardware: str, rounds: int, code: str | None = None) -> str | None:
    """What comes next: every cell of the grid once, then ptf, ptf compiled and their rivals by turns."""
    rows = kept(name, dtype, hardware, code)
    made = [row["system"] for row in rows]
    if missing := [system for system in CELLS if system not in made and name in models_of(system)]:
        return missing[0]
    often = [*OURS, *rivals(rows)]
    least = min(often, key=made.count)
    return least if made.count(least) < rounds else None


def models_of(system: str) -> tuple[str, ...]:
    """The models that the grid has this cell for."""
    return BOTH if system in OURS else GRID[system][-1]


def fastest(rows: list[dict[str, Any]], peers: tuple[str, ...], heap: str) -> str:
    """Of the peers, each by its first round; of those whose name begins so, and with the heap kept or as it is."""
    first = {row["system"]: rate(row) for row in reversed(rows) if row["system"] in GRID and "refused" not in row}
    among = [
        system
        for system in first
        if system.startswith(peers) and heap == ("kept" if system.endswith(KEPT_HEAP) else AS_IT_IS)
    ]
    return max(among, key=lambda system: first[system])


def nearest(rows: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> str:
    """Of the libraries' fastest with the heap as it is and kept, the one that is nearest to ptf over all rounds."""
    return min(
        (fastest(rows, LIBRARIES, heap) for heap in (AS_IT_IS, "kept")),
        key=lambda system: ratios(found["ptf"], found[system])[0],
    )


def rivals(rows: list[dict[str, Any]]) -> list[str]:
    """The settings beside which ptf stands on the page: the fastest of `PEERS`, with their heap kept and as it is, and
    TRL at one row a pass."""
    found = [fastest(rows, peers, heap) for peers in PEERS.values() for heap in (AS_IT_IS, "kept")]
    return list(dict.fromkeys([*found, ONE_ROW]))


def apart(made: dict[str, Any], first: dict[str, Any]) -> float:
    """The largest difference of the losses of a step."""
    return max(abs(a - b) for a, b in zip(made["losses"], first["losses"], strict=True))


def ratios(ptf: list[dict[str, Any]], peer: list[dict[str, Any]]) -> tuple[float, str]:
    """The median of the rounds' ratios, and it with their range."""
    found = [rate(a) / rate(b) for a, b in zip(ptf, peer, strict=False)]
    return median(found), f"**{median(found):.2f}** ({min(found):.2f} – {max(found):.2f})"
