"""Packed SFT at the shapes of published models, with random weights, through `ptf train` on one GPU: tokens a second,
MFU beside the upper bound of `ptf plan --roofline`, and peak memory beside the plan. Writes results/gpu_sft.{jsonl,md}.

    python benchmarks/gpu_sft.py [--shapes Qwen3-0.6B …] [--seq-len 8192] [--rows 4] [--checkpointing none] [--steps 8]
        [--fused …] [--into DIRECTORY] [--device cuda]

Documents have log-normal lengths (median 180, 99th percentile about 2,000); bf16 compute over fp32 master weights,
AdamW, four passes a step. After the measured steps one more runs under torch's profiler: the page has its kernels by
kind. `--device cpu` is for trying the benchmark itself: its figures say nothing about a GPU.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.published_shapes import SHAPES, write_config  # noqa: E402
from ptf.compute.meter import known_gpu  # noqa: E402
from ptf.data.character_tokenizer import character_tokenizer  # noqa: E402
from ptf.model.kernels.fused import Package  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
# shape → sequences a pass, and activation checkpointing: the setting with the highest bound that fits an H200
CASES = {
    "Qwen3-0.6B": (4, "none"),
    "Llama-3.2-1B": (4, "none"),
    "Qwen3-4B": (2, "none"),
    "Gemma-3-4B": (2, "none"),
}
PASSES = 4  # of gradient accumulation
CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
PROFILE = "profile.json"
WARM_UP = 3  # steps that are not measured: the first compile
# a model that a CPU trains in a second, for --device cpu
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 128, "vocab_size": 512}
LIMIT_S = 540.0  # of one shape
# parts of a kernel's name; the first kind with one that fits counts, which is a guess
KINDS = {
    "attention": ("flex_attention", "flash", "fmha"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "optimizer, norm of the gradient": ("adam", "multi_tensor", "lpnorm"),
    "gates": ("swiglu", "geglu", "silu", "gelu"),
    "norms": ("rsqrt", "rms_norm"),
    "softmax and loss": ("softmax", "logsumexp", "_exp_", "_log_"),
    "rotation": ("_cat_", "catarray", "_neg_", "rotate"),
    "copies, sums and moved rows": ("copy", "memcpy", "memset", "elementwise", "index", "embedding", "reduce", "fill"),
}
OTHER = "other"
LARGEST = 12  # kernels that the page names


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


def setting(shape: str, given: argparse.Namespace) -> tuple[int, str]:
    """Return the sequences a pass and the activation checkpointing of a shape."""
    rows, checkpointing = CASES.get(shape, (1, "selective"))
    return given.rows or rows, given.checkpointing or checkpointing


def job(directory: Path, shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Write the model's config, tokenizer and data to a directory, and return the job."""
    steps, tiny = WARM_UP + given.steps, given.device == "cpu"
    rows, checkpointing = setting(shape, given)
    character_tokenizer(CHARACTERS, directory / "model")
    write_config(shape, directory / "model", **(TINY if tiny else {}))
    tokens = steps * PASSES * rows * given.seq_len
    write_documents(directory / "train.jsonl", tokens + tokens // 8, given.seq_len // 4)
    return {
        "recipe": "sft",
        "output": str(directory / "runs"),
        "model": {"path": str(directory / "model"), "init": "random"},
        "data": {
            "seq_len": given.seq_len,
            "sources": {"letters": {"path": str(directory / "train.jsonl"), "kind": "text"}},
        },
        "train": {
            "steps": 100 * steps,  # more than are measured
            "lr": 1e-5,
            "global_batch_sequences": PASSES * rows,
            "micro_batch_sequences": rows,
            "precision": "bf16",
            "activation_checkpointing": checkpointing,
            "fused": "auto" if given.fused is None else given.fused,
        },
        "compute": {"launcher": "local", "device": given.device},
        "checkpoint": {"every": 100 * steps},
        "track": {"tensorboard": False, "print_every": 1},
    }


def computes_with(said: str) -> str:
    """Return the attention and the kernels that a run's first lines name."""
    return next(line.partition("attention=")[2] for line in said.splitlines() if "attention=" in line)


def planned(job_file: Path, name: str) -> dict[str, float]:
    """Return the bound of MFU and the memory that `ptf plan` says of a job on one such GPU; nothing for a GPU that it
    does not know."""
    gpu = known_gpu(name)
    if gpu is None:
        return {}
    command = [sys.executable, "-m", "ptf.cli", "plan", str(job_file), "--workers", "1", "--gpu-type", gpu]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a plan needs no GPU
    command += ["--roofline", "--json", "--gpu-memory-gib", "1000"]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"ptf plan failed\n{done.stderr[-2000:]}")
    plan = json.loads(done.stdout)
    return {"bound": round(plan["mfu"], 4), "planned_gib": round(plan["memory_gib"]["step"]["total"], 2)}


def profiled(job_file: Path, wanted: int, into: Path) -> None:
    """Run `ptf train` in this process; write the milliseconds of each kernel of a step (the first is 0) to a file."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ptf.cli import main as ptf
    from ptf.train.trainer import Trainer

    plain = Trainer.step

    def step(self: Trainer, micro: Any, recipe: Any, number: int, *rest: Any) -> dict[str, float]:
        if number != wanted or self.world.device.type != "cuda":
            return plain(self, micro, recipe, number, *rest)
        torch.cuda.synchronize()
        began = time.monotonic()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            metrics = plain(self, micro, recipe, number, *rest)
            torch.cuda.synchronize()
            spent = time.monotonic() - began
        kernels = {event.key: event.self_device_time_total / 1e3 for event in traced.key_averages()}
        into.write_text(json.dumps({"step_s": spent, "kernels_ms": kernels}))
        return metrics

    Trainer.step = step  # type: ignore[method-assign]
    sys.argv = ["ptf", "train", str(job_file), "--run-name", "bench"]
    sys.exit(ptf())


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def by_kind(kernels_ms: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of each kind of kernel, the largest first."""
    found = dict.fromkeys([*KINDS, OTHER], 0.0)
    for kernel, spent in kernels_ms.items():
        found[kind_of(kernel)] += spent
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def trained(directory: Path, steps: int) -> tuple[str, list[str]]:
    """Start `ptf train` and end it after so many steps and one that is profiled, before it writes a checkpoint; return
    what it printed and its metrics. Raises SystemExit if it fails, or takes longer than LIMIT_S."""
    command = [
        sys.executable,
        __file__,
        "--profiled",
        str(directory / "job.yaml"),
        str(steps),
        str(directory / PROFILE),
    ]
    metrics, output = directory / "runs" / "bench" / "metrics.jsonl", directory / "output.txt"
    deadline = time.monotonic() + LIMIT_S
    with output.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        while True:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if len(lines) > steps:
                return output.read_text(), lines[:steps]
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"ptf train made {len(lines)} of {steps} steps\n{output.read_text()[-3000:]}")
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(shape: str, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train as a user would, and return the medians of the measured steps. Raises SystemExit if training fails."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "job.yaml").write_text(json.dumps(job(directory, shape, given)))  # JSON is YAML
        plan = planned(directory / "job.yaml", name)
        said, lines = trained(directory, WARM_UP + given.steps)
        profile = json.loads((directory / PROFILE).read_text()) if given.device == "cuda" else {}
    rows = [json.loads(line) for line in lines][WARM_UP:]
    return {
        "shape": shape,
        "seq_len": given.seq_len,
        "rows": setting(shape, given)[0],
        "checkpointing": setting(shape, given)[1],
        "computes_with": computes_with(said),
        "steps": len(rows),
        "tokens_per_s": round(median(row["tokens_per_s"] for row in rows)),
        "mfu": round(median(row["mfu"] for row in rows), 4),
        "step_s": round(median(row["step_s"] for row in rows), 4),
        "spread_s": [round(pick(row["step_s"] for row in rows), 4) for pick in (min, max)],
        "peak_gib": round(max(row["peak_memory_gib"] for row in rows), 2),
        **plan,
        **({"profile": profile} if profile else {}),
    }


def profile_section(row: dict[str, Any]) -> list[str]:
    kernels = row["profile"]["kernels_ms"]
    total, step, plain = sum(kernels.values()), 1e3 * row["profile"]["step_s"], 1e3 * row["step_s"]
    lines = [
        "",
        f"## {row['shape']}: one step by kind of kernel",
        "",
        f"{total:,.0f} ms of kernels in a step of {step:,.0f} ms under the profiler; {plain:,.0f} without.",
        "Kinds are guessed from the kernels' names.",
        "",
        "| kind | ms | share |",
        "|---|---|---|",
        *(f"| {kind} | {spent:,.0f} | {spent / total:.1%} |" for kind, spent in by_kind(kernels).items()),
        "",
        f"The {LARGEST} largest kernels:",
        "",
    ]
    largest = sorted(kernels.items(), key=lambda one: -one[1])[:LARGEST]
    return [*lines, *(f"* {spent:,.0f} ms, {kind_of(name)}: `{name[:110]}`" for name, spent in largest)]


def page(found: list[dict[str, Any]]) -> str:
    lines = [
        "# Packed SFT on one GPU",
        "",
        "Command: `make bench-gpu` (`python benchmarks/gpu_sft.py`)",
        "",
        f"{found[0]['device']}, torch {found[0]['torch']}, {found[0]['date']}. `ptf train` of published shapes with",
        f"random weights: sequences of {found[0]['seq_len']:,} tokens, {PASSES} passes a step, bf16 over fp32 master",
        "weights, AdamW, all tokens trained, log-normal documents (median 180, σ 1.03). Medians of the steps after the",
        f"first {WARM_UP}; spread: the fastest and the slowest of them. Bound and planned memory: of the same job,",
        "by `ptf plan --roofline`.",
        "",
        "| model | sequences a pass | checkpointing | computes with | tokens/s | MFU | bound | bound / MFU | step, s "
        "| spread | peak, GiB | planned, GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        bound = f"{row['bound']:.1%} | {row['bound'] / row['mfu']:.2f}" if "bound" in row else "– | –"
        lines.append(
            f"| {row['shape']} | {row['rows']} | {row['checkpointing']} | {row['computes_with']} "
            f"| {row['tokens_per_s']:,} | {row['mfu']:.1%} | {bound} | {row['step_s']:.3f} "
            f"| {row['spread_s'][0]:.3f} to {row['spread_s'][1]:.3f} | {row['peak_gib']:.1f} "
            f"| {row.get('planned_gib', '–')} |"
        )
    for row in found:
        lines += profile_section(row) if "profile" in row else []
    return "\n".join(lines) + "\n"


def device_name(device: str) -> str:
    """Return the name of the device; raise SystemExit if there is no GPU and one is asked for."""
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_sft.py needs a GPU; torch sees none")
    return torch.cuda.get_device_name()


def main() -> None:
    if sys.argv[1:2] == ["--profiled"]:
        profiled(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(CASES), choices=list(SHAPES))
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, help="sequences a pass (default: by shape)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpointing", choices=["none", "selective", "block", "offload"], help="default: by shape")
    parser.add_argument("--fused", nargs="*", choices=get_args(Package), help="default: what is installed")
    parser.add_argument("--into", type=Path, help="write the page and its rows here (default: benchmarks/results)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended on request"))  # so that training, too, is ended
    name, found = device_name(given.device), []
    about = {"device": name, "torch": version("torch"), "date": str(datetime.date.today())}
    into = given.into or (RESULTS if given.device == "cuda" else None)
    for shape in given.shapes:
        found.append({**about, **measure(shape, name, given)})
        print(json.dumps(found[-1]), flush=True)
        if into:
            into.mkdir(parents=True, exist_ok=True)
            (into / "gpu_sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
            (into / "gpu_sft.md").write_text(page(found))
    print("\n" + page(found))


if __name__ == "__main__":
    main()
