"""A model of published size on a CPU: Qwen3-0.6B's shape with random weights takes two steps of SFT (whole, LoRA, LoRA
beside NF4) and one of GRPO, each in a process of its own, in bf16. Writes results/published_size.md: the most memory
that the process had, above what it has once everything is imported, beside what `ptf plan` says.

    python benchmarks/published_size.py [--only NAME …] [--seq-len 256]

A CPU without instructions for bf16 takes minutes for 64 tokens; give it `--seq-len 32`. Exits 1 if a job fails or needs
more than 115 % of its plan, or if the machine's memory is not enough.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import commit, cpu  # noqa: E402
from benchmarks.published_shapes import SHAPES, write_config  # noqa: E402

SHAPE = "Qwen3-0.6B"
RESULTS = Path(os.environ.get("PTF_RESULTS", ROOT / "benchmarks" / "results")) / "published_size.md"
KEPT = RESULTS.with_suffix(".json")
GIB = 2**30
LORA: dict[str, Any] = {"lora": {"rank": 16}}
JOBS: dict[str, dict[str, Any]] = {
    "SFT": {},
    "SFT, LoRA": {"model": LORA},
    "SFT, LoRA beside NF4": {"model": {**LORA, "quantization": "nf4"}},
    "GRPO": {"recipe": "grpo"},
}
# draws the weights, in a process of its own
DRAWN = """
import sys
from pathlib import Path
from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.model import bridge
from ptf.train.trainer import load_model
shape, directory = Path(sys.argv[1]), Path(sys.argv[2])
model, family = load_model(shape, World(), ModelConfig(path="", init="random"), seed=0, precision="fp32")
bridge.save_hf(bridge.hf_tensors(model, family), shape, directory, writes=True)
"""
# in the process that is measured: what it has after its imports, the plan, and the most that it had while it trained;
# what comes after that is in host memory on a GPU machine too: the checkpoint's copy, and the export, which loads the
# model again
MEASURED = """
import json, resource, sys
from pathlib import Path
from ptf.config import load
from ptf.rl import controller, online_budget, roles, sampler
from ptf.rl.engines import native
from ptf.run import resolved, run
from ptf.train import budget, loop
job, directory = resolved(load(sys.argv[1])), Path(sys.argv[2])
if job.rollout is None:
    plan = budget.budget(job, directory, 1).memory.total
else:
    # one process holds all roles, and offloads none: the update of the policy beside the engine's weights
    online = online_budget.online_budget(job, directory, 1)
    plan = online.update.memory.total + online.engine.weights
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
imported, peaks = peak(), []
def before(kind, name):
    own = getattr(kind, name)
    setattr(kind, name, lambda *args: (peaks.append(peak()), own(*args))[1])
for kind in (loop.OfflineAttempt, roles.Learner):
    before(kind, "save")
    before(kind, "export")
made = run(job, "run")
rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
print("MEASURED", json.dumps({"imported": imported, "peak": peaks[0], "plan": plan, "loss": [r["loss"] for r in rows]}))
"""


def write_model(directory: Path) -> None:
    """Write the published config with a small tokenizer; the weights are drawn by the run."""
    from ptf.data.character_tokenizer import character_tokenizer

    write_config(SHAPE, directory)
    tokenizer = character_tokenizer("0123456789+-=", directory)
    config = json.loads((directory / "config.json").read_text())
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    (directory / "config.json").write_text(json.dumps(config | ids))


def job(directory: Path, changes: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Return the job of two steps of SFT, or of one of GRPO, with these changes."""
    rng = np.random.default_rng(0)
    sums = [[f"{a}+{b}=", str(a + b)] for a, b in rng.integers(10, 100_000, (400, 2)).tolist()]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
    (directory / "chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    prompts = [{"messages": c[:1], "answer": c[1]["content"]} for c in chats]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    online = changes.get("recipe") == "grpo"
    raw: dict[str, Any] = {
        "recipe": changes.get("recipe", "sft"),
        "output": str(directory / "runs"),
        "model": {"path": str(directory / "model"), **changes.get("model", {})},
        "data": {
            "sources": {"sums": {"path": str(directory / ("prompts.jsonl" if online else "chats.jsonl"))}},
            "seq_len": seq_len,
            "partitions": 1,
        },
        "train": {"steps": 1 if online else 2, "lr": 1e-5, "precision": "bf16", "micro_batch_sequences": 1},
        "checkpoint": {"every": 10},
        "compute": {"launcher": "local", "device": "cpu"},
        "track": {"tensorboard": False},
    }
    if online:
        reward = {"use": "ptf.rl.rewards:exact", "args": {"column": "answer"}}
        raw["rollout"] = {
            "reward": reward,
            "prompts_per_step": 1,
            "group_size": 4,
            "max_new_tokens": 8,
            "engine": "native",
        }
        raw["data"]["sources"]["sums"]["kind"] = "prompt"
    else:
        raw["train"]["global_batch_sequences"] = 2
    return raw


def measure(name: str, seq_len: int) -> dict[str, Any]:
    """Run one of the jobs; return what it printed, its seconds of processor and of the clock."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_model(directory / "shape")
        drawn = [sys.executable, "-c", DRAWN, str(directory / "shape"), str(directory / "model")]
        subprocess.run(drawn, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        (directory / "job.yaml").write_text(yaml.safe_dump(job(directory, JOBS[name], seq_len)))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(directory / "job.yaml"), str(directory / "model")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not found:
        sys.exit(f"{name} failed with status {done.returncode}\n{done.stdout[-2000:]}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(found[0].removeprefix("MEASURED ")), "cpu_s": spent, "clock_s": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(JOBS))
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence")
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in args.only:
        where = {"commit": commit(), "machine": cpu(), "date": time.strftime("%Y-%m-%d")}
        kept[name] = measure(name, args.seq_len) | {"seq_len": args.seq_len} | where
        print(name, json.dumps(kept[name]), flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    return write(kept)


def write(kept: dict[str, dict[str, Any]]) -> int:
    """Write the page; return 1 if a job needs more than its plan allows, or is not there."""
    lines = [
        "| job | sequence, tokens | memory above the imports, GiB | `ptf plan`, GiB | share | CPU-seconds | where |",
        "|---|---|---|---|---|---|---|",
    ]
    missed = [name for name in JOBS if name not in kept]
    for name, found in ((name, kept[name]) for name in JOBS if name in kept):
        used = found["peak"] - found["imported"]
        planned = f"{found['plan'] / GIB:.1f}"
        share = f"{used / found['plan']:.0%}"
        if used > 1.15 * found["plan"]:
            missed.append(name)
        where = f"{found['cpu_s']:.0f} | {found['date']}, {found['commit']}, {found['machine']}"
        lines.append(f"| {name} | {found['seq_len']} | {used / GIB:.1f} | {planned} | {share} | {where} |")
    parameters = f"{SHAPES[SHAPE]['num_hidden_layers']} layers of {SHAPES[SHAPE]['hidden_size']}"
    RESULTS.write_text(
        "# A model of published size on a CPU\n\n"
        f"Command: `python benchmarks/published_size.py`\n\n{SHAPE}'s shape ({parameters}, 151,936 vocabulary rows), "
        "random weights, bf16, one process. The plan is that of a GPU, whose loss head has larger\nchunks; for GRPO it "
        "is that of the policy's update and the engine's weights. The memory of a process is the\nmost that was "
        "resident until the checkpoint of the last step, above what it has after its imports.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    print(f"wrote {RESULTS.name}" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
