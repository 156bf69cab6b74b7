"""Where ptf's SFT step goes, by kind of kernel, and how fast it could be if its matrix products were all of it.

    python benchmarks/step_profile.py [--models small4 bigvocab] [--dtypes fp32 bf16] [--rounds 3]

The step is that of benchmarks/train_step.py, on one thread: the same shapes, lengths and weights. torch's profiler
gives the seconds of each operation, without those that it calls; they are summed by kind (`KINDS`). Every matrix
product of the step is then repeated alone, on random matrices of the same shapes and dtype that lie in the caches: the
fastest times together, or those in the step where they are less, are the least that a step can take with torch's
products. Writes results/step_profile.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from flow_runs import commit, cpu, results_page
from train_grid import HEADS, LR, MODELS, SEQUENCES, WIDTH
from train_step import documents, prepared, start

RESULTS = results_page("step_profile.md")
# parts of an operation's name, without aten::; the first that fits counts
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm"),
    "attention, backward": ("attention_for_cpu_backward", "attention_backward"),
    "attention, forward": ("attention",),
    "optimizer, norm of the gradient": ("adam", "foreach", "linalg", "vector_norm"),
    "softmax and loss": ("softmax", "gather", "scatter", "logsumexp", "crossentropy"),
    "copies, and moving rows": ("copy", "cat", "index", "clone", "embedding", "zero", "fill", "slice"),
    "norms, gates, rotation": (
        "norm",
        "gate",
        "rotation",
        "mul",
        "add",
        "sub",
        "div",
        "neg",
        "silu",
        "sigmoid",
        "pow",
        "mean",
        "rsqrt",
        "sum",
    ),
}
OTHER = "the rest, with Python"
LARGEST = 6  # operations of a table


def kind_of(name: str) -> str:
    """The kind of an operation."""
    plain = name.removeprefix("aten::").lstrip("_").lower()
    for kind, parts in KINDS.items():
        if kind == "matrix products":
            if plain in parts:
                return kind
        elif any(part in plain for part in parts):
            return kind
    return OTHER


def products(events: Any) -> Counter[tuple[Any, ...]]:
    """How often each product of two matrices was computed, [rows, inner] by [inner, columns]."""
    found = Counter[tuple[Any, ...]]()
    for event in events:
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = event.input_shapes[:2] if event.name == "aten::mm" else event.input_shapes[1:3]
            found[tuple(a), tuple(b)] += 1
    return found


def fastest(compute: Callable[[], object]) -> float:
    """The least CPU-seconds of several calls."""
    best, until = float("inf"), time.monotonic() + 0.3
    while time.monotonic() < until or best == float("inf"):
        began = time.process_time()
        compute()
        best = min(best, time.process_time() - began)
    return best


def alone(found: Counter[tuple[Any, ...]], dtype: str) -> tuple[float, float]:
    """Seconds of these products by themselves, each at its fastest, and their FLOPs."""
    import torch

    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    seconds = flops = 0.0
    for (a, b), times in found.items():
        left, right = torch.randn(a, dtype=kind), torch.randn(b, dtype=kind)
        # as a linear layer computes: x · Wᵀ forward, g · W and gᵀ · x backward; the fastest order in memory counts
        orders = (right, right.t().contiguous().t())
        seconds += times * min(fastest(partial(torch.mm, left, one)) for one in orders)
        flops += times * 2 * a[0] * a[1] * b[1]
    return seconds, flops


def attention_flops(model: Any, lengths: Sequence[int]) -> float:
    """FLOPs of a step's causal attention as it is computed: the scores twice, which MFU counts once."""
    from ptf.model.flops import Flops

    counted = Flops.of(model)
    return 7 / 6 * (counted.step(lengths, 0) - counted.per_token * sum(lengths))


def profiled(given: dict[str, Any]) -> dict[str, Any]:
    """One process's steps: the first ones untimed, then as many with the clock alone, then one with the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ptf.recipes.sft.recipe import SFT

    with prepared(given) as (trainer, batches):
        spent = []
        for step, batch in enumerate(batches[:-1]):
            began = time.process_time()
            trainer.step([batch], SFT(), step)
            spent.append(time.process_time() - began)
        attending = attention_flops(trainer.model, batches[-1].lengths)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traced:
            began = time.process_time()
            trainer.step([batches[-1]], SFT(), len(batches) - 1)
            slowed = time.process_time() - began
    kinds, calls = Counter[str](), Counter[str]()
    for event in traced.events():
        kinds[kind_of(event.name)] += event.self_cpu_time_total / 1e6
    for event in traced.key_averages():
        calls[event.key] += event.self_cpu_time_total / 1e6
    kinds[OTHER] += max(0.0, slowed - sum(kinds.values()))
    seconds, flops = alone(products(traced.events()), given["dtype"])
    return {
        "step_s": median(spent[given["warmup"] :]),
        "slowed_s": slowed,
        "kinds": dict(kinds),
        "largest": dict(calls.most_common(LARGEST)),
        "products_s": seconds,
        "flops": flops,
        "attention_flops": attending,
        "tokens": sum(batches[-1].lengths),
        "threads": torch.get_num_threads(),
    }


def measured(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """The profile of a model in a dtype, in a process of its own with one thread."""
    with tempfile.TemporaryDirectory() as directory:
        model, path = start(Path(directory), MODELS[name]), Path(directory) / "documents.npz"
        written = rounds + 2
        documents(path, MODELS[name]["vocab_size"], SEQUENCES[name], written)
        given = {
            "model": model,
            "width": WIDTH,
            "documents": str(path),
            "rows": SEQUENCES[name],
            "dtype": dtype,
            "written": written,
            "warmup": 1,
            "lr": LR,
            "train": {},
        }
        done = subprocess.run(
            [sys.executable, __file__, "--one", json.dumps(given)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(name: str, dtype: str, found: dict[str, Any]) -> str:
    """The section of a model and a dtype."""
    step, total, attending = found["step_s"], sum(found["kinds"].values()), found["attention_flops"]
    multiplying = found["kinds"]["matrix products"]
    inside, most = multiplying * step / total, found["flops"] / 1e9
    least = min(found["products_s"], inside)
    rows = [
        f"| {kind} | {step * seconds / total:.3f} | {seconds / total:.0%} |"
        for kind, seconds in sorted(found["kinds"].items(), key=lambda one: -one[1])
    ]
    largest = ", ".join(f"{key.removeprefix('aten::')} {value / total:.0%}" for key, value in found["largest"].items())
    return (
        f"## {name}, {dtype}\n\n"
        f"{found['tokens']:,} tokens in {step:.2f} CPU-seconds ({found['slowed_s']:.2f} with the profiler): "
        f"{found['tokens'] / step:,.0f} a second. Its {most:,.0f} GFLOP of matrix products\n"
        f"take {found['products_s']:.2f} s alone ({most / found['products_s']:,.0f} GFLOP/s; in the step "
        f"{most / inside:,.0f}); the smaller of the two is **{least / step:.0%} of the step**: with everything else at "
        f"no cost,\n{found['tokens'] / least:,.0f} tokens a second. The {attending / 1e9:,.0f} GFLOP of attention "
        f"would take {attending / found['flops'] * least:.2f} s at that rate; with both,\n"
        f"{found['tokens'] / (1 + attending / found['flops']) / least:,.0f} tokens a second. "
        f"Largest operations: {largest}.\n\n"
        "| kind | CPU-s | share |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(profiled(json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3, help="timed steps without the profiler")
    asked = parser.parse_args()
    sections = []
    for name in asked.models:
        for dtype in asked.dtypes:
            found = measured(name, dtype, asked.rounds)
            print(json.dumps({"model": name, "dtype": dtype, **found}), flush=True)
            sections.append(table(name, dtype, found))
    RESULTS.write_text(
        "# Where ptf's SFT step goes on a CPU\n\n"
        f"Command: `{' '.join(['python benchmarks/step_profile.py', *sys.argv[1:]])}`  \n"
        f"Hardware: {cpu()}, one thread, no GPU  \nDate: {time.strftime('%Y-%m-%d')}  \nCommit: {commit()}\n\n"
        f"The step of [train_step.md](train_step.md): packed sequences of {WIDTH:,} tokens, {HEADS}, one thread. "
        f"CPU-seconds are the median of {asked.rounds} steps\n"
        "without a profiler; shares are torch's profiler's of one more step, which makes many small operations dearer "
        "than they are. *Alone*: each of the step's products\non random matrices of its shapes that lie in the "
        "caches, in the faster of two orders in memory.\n\n" + "\n".join(sections)
    )
    print(f"wrote {RESULTS.name}")


if __name__ == "__main__":
    main()
