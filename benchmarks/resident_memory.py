"""The resident memory of training processes on a CPU, beside what `ptf plan` says. Writes results/resident_memory.md.

    python benchmarks/resident_memory.py [--only NAME …] [--seq-len TOKENS]

Qwen3-0.6B's published shape, in bf16, takes two steps of SFT (whole, LoRA, LoRA beside NF4) and one of GRPO in one
process; models of 197 million parameters, in fp32, take steps of SFT, LoRA, DPO and GRPO on two ranks. Each job is run
by `ptf train`. The memory of a rank is the most that was resident until its first checkpoint, above what it has once
everything is imported. `--seq-len` shortens the sequences of Qwen3-0.6B: a CPU without instructions for bf16 takes
minutes for 64 tokens.

Exits 1 if a job fails, or is not within 15 % of its plan (published size: needs more than 115 %).
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import commit, cpu  # noqa: E402
from benchmarks.pages import write_page  # noqa: E402
from benchmarks.published_shapes import write_config  # noqa: E402

SHAPE = "Qwen3-0.6B"
RESULTS = Path(os.environ.get("PTF_RESULTS", ROOT / "benchmarks" / "results")) / "resident_memory.md"
KEPT = RESULTS.with_suffix(".json")
GIB = 2**30
DIFFERENCE = 0.15
LORA: dict[str, Any] = {"lora": {"rank": 16}}
SMALL = {"num_hidden_layers": 12, "vocab_size": 8192}


@dataclass(frozen=True)
class Case:
    """A job: its recipe and section `model`, and the model's differences from Qwen3-0.6B."""

    recipe: str = "sft"
    model: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    @property
    def online(self) -> bool:
        return self.recipe == "grpo"


CASES = {
    "SFT": Case(),
    "SFT, LoRA": Case(model=LORA),
    "SFT, LoRA beside NF4": Case(model={**LORA, "quantization": "nf4"}),
    "GRPO": Case("grpo"),
    "SFT, two ranks": Case(shape=SMALL, ranks=2),
    "LoRA, two ranks": Case(model=LORA, shape=SMALL, ranks=2),
    "DPO, two ranks": Case("dpo", shape=SMALL, ranks=2),
    "GRPO, two ranks": Case("grpo", shape=SMALL, ranks=2),
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
# A module that every process of a job imports when it starts. In one that trains, it makes a file when everything is
# imported, and another when its first checkpoint begins: that, and the export, take host memory on a GPU machine too.
HOOK = """
import importlib.abc, importlib.machinery, os, pathlib, sys, time
TRAINERS = {"ptf.train.loop": "OfflineAttempt", "ptf.rl.roles": "Learner"}
def reached(moment):
    pathlib.Path(os.environ["PTF_MEASURED"], f"{os.getpid()}.{moment}").touch()
class Loader(importlib.abc.Loader):
    def __init__(self, own):
        self.own = own
    def create_module(self, spec):
        return self.own.create_module(spec)
    def exec_module(self, module):
        self.own.exec_module(module)
        import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
        import tokenizers, bitsandbytes
        kind = getattr(module, TRAINERS[module.__name__])
        save = kind.save
        def measured(*args, **kwargs):
            reached("saved")
            return save(*args, **kwargs)
        measured.__dict__.update(save.__dict__)
        kind.save = measured
        reached("imported")
        time.sleep(0.5)  # until that was seen
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in TRAINERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader)
        return spec
if "PTF_MEASURED" in os.environ:
    sys.meta_path.insert(0, Finder())
"""
PLAN = """
import json, sys
from pathlib import Path
from ptf.config import load
from ptf.rl import online_budget
from ptf.train import budget
job, directory, ranks = load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if job.rollout is None:
    found = budget.budget(job, directory, ranks)
    plan = found.memory.total
else:
    online = online_budget.online_budget(job, directory, ranks)
    found = online.update
    plan = found.memory.total + (online.engine.weights if ranks == 1 else 0.0)
print(json.dumps({"plan": plan, "parameters": found.parameters}))
"""


def memory(pid: int) -> tuple[int, int]:
    """Return the bytes of a process that are resident, and those of them that are no pages of files."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    size = {name: 1024 * int(lines[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem")}
    return size["VmRSS"], size["RssAnon"] + size["RssShmem"]


def watch(moments: Path, process: subprocess.Popen) -> list[tuple[int, int]]:
    """Return, of each process that trains, the most memory until its first checkpoint, above what it had after its
    imports: resident, and without the pages of files."""
    imported: dict[int, tuple[int, int]] = {}
    most: dict[int, tuple[int, int]] = {}
    while process.poll() is None:
        for path in moments.glob("*.imported"):
            pid = int(path.stem)
            if not path.with_suffix(".saved").exists():
                with contextlib.suppress(OSError, KeyError):
                    now = memory(pid)
                    imported.setdefault(pid, now)
                    before = most.get(pid, now)
                    most[pid] = max(now[0], before[0]), max(now[1], before[1])
        time.sleep(0.005)
    trained = [pid for pid in most if (moments / f"{pid}.saved").exists()]
    return [(most[pid][0] - imported[pid][0], most[pid][1] - imported[pid][1]) for pid in trained]


def write_model(directory: Path, changes: dict[str, Any]) -> None:
    """Write the published config, with these changes, and a small tokenizer."""
    from ptf.data.character_tokenizer import character_tokenizer

    write_config(SHAPE, directory, **changes)
    tokenizer = character_tokenizer("0123456789+-=", directory)
    config = json.loads((directory / "config.json").read_text())
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    (directory / "config.json").write_text(json.dumps(config | ids))


def job(directory: Path, case: Case, seq_len: int) -> dict[str, Any]:
    """Return the job of two steps, or of one of GRPO."""
    rng = np.random.default_rng(0)
    sums = [[f"{a}+{b}=", str(a + b)] for a, b in rng.integers(10, 100_000, (800, 2)).tolist()]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
    rows: dict[str, list[dict[str, Any]]] = {
        "chat": [{"messages": c} for c in chats],
        "preference": [{"prompt": c[:1], "chosen": c[1:], "rejected": [{**c[1], "content": "0"}]} for c in chats],
        "prompt": [{"messages": c[:1], "answer": c[1]["content"]} for c in chats],
    }
    kind = {"grpo": "prompt", "dpo": "preference"}.get(case.recipe, "chat")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[kind]))
    small = bool(case.shape)
    raw: dict[str, Any] = {
        "recipe": case.recipe,
        "output": str(directory / "runs"),
        "model": {"path": str(directory / "model"), **case.model},
        "data": {
            "sources": {"sums": {"path": str(directory / "rows.jsonl"), "kind": kind}},
            "seq_len": seq_len,
            "partitions": case.ranks,
        },
        "train": {
            "steps": 1 if case.online else 2,
            "lr": 1e-5,
            "precision": "fp32" if small else "bf16",
            "micro_batch_sequences": 1,
            "global_batch_sequences": 2 * case.ranks,
            "compile": False,  # `auto` compiles on a GPU only, which the plan counts on
        },
        "checkpoint": {"every": 10},
        "compute": {"launcher": "local", "device": "cpu", "threads": 1 if case.ranks > 1 else 2},
        "track": {"tensorboard": False},
    }
    if case.ranks > 1:
        raw["compute"] |= {"launcher": "ray" if case.online else "torchrun", "workers": case.ranks}
    if case.online:
        # two steps of the optimizer, of which the second has moments from its beginning
        raw["algo"] = {"num_minibatches": 2 if small else 1}
        reward = {"use": "ptf.rl.rewards:exact", "args": {"column": "answer"}}
        raw["rollout"] = {
            "reward": reward,
            "prompts_per_step": 2 if small else 1,
            "group_size": 4,
            "max_new_tokens": seq_len - 40 if small else 8,
            "engine": "native",
            "transport": "object_store" if case.ranks == 1 else "files",  # as on GPUs, no whole model on its way
        }
    return raw


def measure(name: str, seq_len: int) -> dict[str, Any]:
    """Run one of the jobs; return the memory of each rank, the plan, and the seconds of processor and of the clock."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        directory, measured = Path(scratch), Path(scratch) / "measured"
        measured.mkdir()
        (directory / "hook").mkdir()
        (directory / "hook" / "sitecustomize.py").write_text(HOOK)
        write_model(directory / "shape", case.shape)
        config = directory / "job.yaml"
        config.write_text(yaml.safe_dump(job(directory, case, seq_len)))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{directory / 'hook'}:{ROOT}",
            # what is freed goes back to the system at once
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        }
        drawn = [sys.executable, "-c", DRAWN, str(directory / "shape"), str(directory / "model")]
        subprocess.run(drawn, cwd=ROOT, env=environment, check=True)
        plan = [sys.executable, "-c", PLAN, str(config), str(directory / "model"), str(case.ranks)]
        planned = json.loads(subprocess.run(plan, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "ptf.cli", "train", str(config)]
        with subprocess.Popen(command, cwd=ROOT, env={**environment, "PTF_MEASURED": str(measured)}) as process:
            ranks = watch(measured, process)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode or len(ranks) != case.ranks:
        sys.exit(f"{name} ended with status {process.returncode}, and {len(ranks)} of {case.ranks} ranks were measured")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    resident, used = (max(each) for each in zip(*ranks, strict=True))
    return {**planned, "resident": resident, "used": used, "cpu_s": spent, "clock_s": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence of Qwen3-0.6B")
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in args.only:
        seq_len = 512 if CASES[name].shape else args.seq_len
        where = {"commit": commit(), "machine": cpu(), "date": time.strftime("%Y-%m-%d")}
        kept[name] = {**measure(name, seq_len), "seq_len": seq_len, **where}
        print(name, json.dumps(kept[name]), flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    return write(kept)


def write(kept: dict[str, dict[str, Any]]) -> int:
    """Write the page; return 1 if a job is too far from its plan, or is not there."""
    lines = [
        "| job | parameters | tokens | resident, GiB | without files, GiB | plan, GiB | share of the plan "
        "| date, commit, machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missed = [name for name in CASES if name not in kept]
    for name, found in ((name, kept[name]) for name in CASES if name in kept):
        share = found["used"] / found["plan"]
        if share > 1 + DIFFERENCE or (CASES[name].shape and share < 1 - DIFFERENCE):
            missed.append(name)
        sizes = f"{found['parameters'] / 1e6:.0f} M | {found['seq_len']}"
        gib = " | ".join(f"{found[key] / GIB:.2f}" for key in ("resident", "used", "plan"))
        where = f"{found['date']}, {found['commit']}, {found['machine']}"
        lines.append(f"| {name} | {sizes} | {gib} | {share:.2f} | {where} |")
    about = (
        "# Resident memory beside the plan\n\n"
        "Command: `python benchmarks/resident_memory.py`\n\n"
        "Each job is run by `ptf train` on a CPU: Qwen3-0.6B's published shape in bf16 in one process, and 12 of its\n"
        "layers with a vocabulary of 8,192 in fp32 on two ranks. Weights are random. Memory is the most that the\n"
        "fullest rank had until its first checkpoint began, above what it had once everything was imported: resident,\n"
        "and without the pages of mapped files (the checkpoint's, while it is read), which the system drops where it\n"
        "needs room. The plan, with which the latter is compared, is that of `ptf plan` for as many GPUs, whose loss\n"
        "head has larger chunks, with `train.compile: false`, as on a CPU; of GRPO it is the policy's update, and in\n"
        "one process the engine's weights too (with two ranks, the engine has a process of its own, and weights reach\n"
        "it through files).\n\n"
    )
    return write_page(RESULTS, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
