"""The SFT step beside TRL's packing, in one interleaved run (A, B, A, B, …): real tokens per CPU-second of one thread, and the memory that a
step adds.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/train_step.py [--models small4 bigvocab] [--dtypes fp32 bf16] [--rounds 3]

Documents: log-normal lengths (median 180, p99 about 2,000, at most 2,048), the first 40 % of each is prompt. Both train Qwen3 shapes with random
weights, AdamW, one thread. Prints a JSON line a round and writes results/train_step.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu

RESULTS = ROOT / "benchmarks" / "results" / "train_step.md"
PEER = ROOT / ".venv-peers" / "bin" / "python"
WIDTH, ROWS = 2048, 4
SHAPE = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": WIDTH, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
MODELS = {"small4": SHAPE | {"vocab_size": 4096}, "bigvocab": SHAPE | {"vocab_size": 151_936}}


def documents(path: Path, vocab: int, count: int = 600) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(180), 1.03, count), 8, 2048).astype(int)
    np.savez(path, lengths=lengths, tokens=rng.integers(0, vocab, lengths.sum()))


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over packed rows, as a run does it."""
    import torch

    from ptf.compute.world import joined
    from ptf.config.schema import ModelConfig, TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.packing import pack_all
    from ptf.data.sample import Sample
    from ptf.recipes.sft.recipe import SFT
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    starts = np.cumsum(stored["lengths"]) - stored["lengths"]
    samples = [
        (Sample(stored["tokens"][s : s + n].astype(np.int32), (np.arange(n) >= 0.4 * n).astype(np.float32)),)
        for s, n in zip(starts, stored["lengths"], strict=True)
    ]
    rows = pack_all(samples, WIDTH)
    total = given["steps"] + given["warmup"]
    with tempfile.TemporaryDirectory() as directory, joined("cpu", 600, threads=1) as world:
        (Path(directory) / "config.json").write_text(json.dumps(given["config"]))
        train = TrainConfig(steps=total, lr=1e-4, schedule="constant", precision=given["dtype"], **given["train"])
        spec = ModelConfig(path=directory, init="random")
        model, _ = load_model(Path(directory), world, spec, seed=given["seed"], precision=train.precision, compiled=train.compile)
        trainer = Trainer(model, world, train)
        cpu_s, wall_s, tokens = [], [], []
        base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        for step in range(total):
            batch = Batch.of(rows[step * ROWS : (step + 1) * ROWS], WIDTH)
            began = time.process_time(), time.perf_counter()
            trainer.step([batch], SFT(), step)
            if step >= given["warmup"]:
                cpu_s.append(time.process_time() - began[0])
                wall_s.append(time.perf_counter() - began[1])
                tokens.append(sum(batch.lengths))
        torch.set_num_threads(1)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "tokens": tokens, "added_mib": peak - base}))


def round_of(system: str, given: dict[str, Any], script: str = "benchmarks/train_step.py", peer: str = "benchmarks/peers/trl_sft.py") -> dict[str, Any]:
    """What one round in a process of its own prints."""
    command = [str(PEER), peer] if system == "TRL" else [sys.executable, script, "--one"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "" if system == "TRL" else str(ROOT)}
    done = subprocess.run([*command, json.dumps(given)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--train", type=json.loads, default={}, help="further keys of the train section, as JSON")
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/train_step.py needs the peer's environment: make peers")
    lines = []
    for model in asked.models:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "documents.npz"
            documents(path, MODELS[model]["vocab_size"])
            for dtype in asked.dtypes:
                given = {"config": MODELS[model], "documents": str(path), "width": WIDTH, "rows": ROWS, "dtype": dtype}
                given |= {"steps": asked.steps, "warmup": asked.warmup, "train": asked.train}
                found: dict[str, list[dict[str, Any]]] = {"ptf": [], "TRL": []}
                for seed in range(asked.rounds):
                    for system in found:
                        found[system].append(round_of(system, {**given, "seed": seed}))
                        print(json.dumps({"model": model, "dtype": dtype, "system": system, "round": seed, **found[system][-1]}), flush=True)
                lines.append(summary(model, dtype, found))
                print(lines[-1], flush=True)
    write(lines, "python " + " ".join(["benchmarks/train_step.py", *sys.argv[1:]]), asked)


def summary(model: str, dtype: str, found: dict[str, list[dict[str, Any]]]) -> str:
    rates = {system: [sum(r["tokens"]) / sum(r["cpu_s"]) for r in rounds] for system, rounds in found.items()}
    added = {system: median(r["added_mib"] for r in rounds) for system, rounds in found.items()}
    ratios = [a / b for a, b in zip(rates["ptf"], rates["TRL"], strict=True)]
    cells = [f"{median(rates[s]):,.0f} ({min(rates[s]):,.0f} – {max(rates[s]):,.0f})" for s in ("ptf", "TRL")]
    memory = f"{added['ptf']:.0f} / {added['TRL']:.0f} = {added['ptf'] / added['TRL']:.2f}"
    return f"| {model} | {dtype} | {' | '.join(cells)} | **{median(ratios):.2f}** ({min(ratios):.2f} – {max(ratios):.2f}) | {memory} |"


def write(lines: list[str], command: str, asked: argparse.Namespace) -> None:
    RESULTS.write_text(
        "# The SFT step beside TRL\n\n"
        f"Command: `{command}`  \nHardware: {cpu()}, one thread, no GPU  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"Interleaved rounds ({asked.rounds} of each), {asked.steps} timed steps a round after {asked.warmup} of warm-up, {ROWS} rows of {WIDTH:,}\n"
        "tokens a step.\n"
        "Documents: log-normal lengths (median 180, p99 about 2,000), the first 40 % prompt. TRL: SFTTrainer with packing (bfd), versions in\n"
        "`benchmarks/requirements-peers.txt`. `small4`: Qwen3 shape, width 256, 4 layers, vocabulary 4,096; `bigvocab`: vocabulary 151,936, tied.\n"
        "These ratios are a CPU's: on a GPU with flash attention TRL's losses are others.\n\n"
        "| model | dtype | ptf, real tokens per CPU-second | TRL | ratio | MiB that the step adds |\n|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
