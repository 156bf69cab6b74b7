"""Does on-policy training learn what it should, on every seed, and does it not where it must not? One small model (2 layers of 64), tasks of a few digits,
our own decoder as the engine, everything in one process. Writes results/learning_rl.md; exits 1 where a bar is missed.

    python benchmarks/learning_rl.py [--seeds 0 1 2 3 4] [--only NAME …]

    count      from random weights: the next four digits after one; reward: the share of them that is right
    reverse    six digits turned round, from a model that SFT was stopped on early; reward: an answer that is right
    calculate  an agent that has to ask a calculator and to say what it answered (ptf.tasks.calculator), from SFT that was stopped early
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # of the processes that find rewards

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.data.sample import Atom, Sample  # noqa: E402
from ptf.data.trajectory import Group  # noqa: E402
from ptf.recipes.grpo import GRPO  # noqa: E402
from ptf.rl import controller  # noqa: E402
from ptf.rl.cluster import LocalGroup  # noqa: E402
from ptf.rl.sync import SyncError  # noqa: E402
from ptf.run import run  # noqa: E402
from ptf.tasks import calculator  # noqa: E402
from ptf.tasks.tiny import write_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "learning_rl.md"


def share(row: Mapping[str, Any], text: str) -> float:
    """Of the answer's characters, those that are right, and in their place."""
    return sum(a == b for a, b in zip(text, row["answer"], strict=False)) / len(row["answer"])


class Flipped(GRPO):
    """What was good is made less likely."""

    def credit(self, groups: Sequence[Group]) -> list[Atom]:
        return [
            tuple(Sample(s.tokens, s.weights, s.source, {**s.streams, "advantages": -s.streams["advantages"]}) for s in atom) for atom in super().credit(groups)
        ]


def shifted(samples: Callable[..., list[Sample]]) -> Callable[..., list[Sample]]:
    """Samples whose mask is one token too early."""

    def made(*args: Any) -> list[Sample]:
        return [Sample(s.tokens, np.roll(s.weights, -1), s.source, {k: np.roll(v, -1) for k, v in s.streams.items()}) for s in samples(*args)]

    return made


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def unsynced(call: Callable) -> Callable:
    """An engine that says it has loaded what it was sent, and keeps what it had."""

    def made(self: LocalGroup, method: str, *args: Any) -> Any:
        if self.spec.name == "rollout" and method == "load" and args[1].version > 0:
            self.role.engine.version = args[1].version
            return type("Receipt", (), {"version": args[1].version, "tensors": len(args[1].digests)})()
        return call(self, method, *args)

    return made


@dataclass(frozen=True)
class Check:
    task: str
    recipe: str | dict = "grpo"
    algo: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 200
    lr: float = 1e-3
    rollout: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    teacher: bool = False
    bar: str = "reward reaches 0.95"


TWICE = {"epochs": 2}
CHECKS = {
    "GRPO": Check("count", algo=TWICE),
    "RLOO": Check("count", algo=TWICE | {"baseline": "leave_one_out", "scale_by_std": False}),
    "Dr.GRPO": Check("count", algo=TWICE | {"scale_by_std": False, "mean_over": "length"}),
    "DAPO": Check("count", algo=TWICE | {"clip_high": 0.28, "overlong": 1}, rollout={"equal": "replace", "max_rounds": 2, "max_new_tokens": 5}),
    "GSPO": Check("count", algo=TWICE | {"ratio": "answer", "mean_over": "answers", "clip_low": 0.1, "clip_high": 0.1}),
    "GRPO, KL to the reference and entropy": Check("count", algo=TWICE | {"kl": 0.003, "entropy": 0.001}),
    "GRPO, LoRA": Check("reverse", algo=TWICE, model={"lora": {"rank": 16}}, lr=3e-3, steps=60, bar="pass@1 ≥ 0.99"),
    "PPO": Check("count", "ppo", TWICE | {"value_clip": 10.0, "critic_lr": 3e-3, "lam": 1.0}, lr=2e-3, steps=200),
    "SFT, then GRPO": Check("reverse", algo=TWICE, steps=60, bar="pass@1 ≥ 0.99"),
    "SFT, then PPO": Check("reverse", "ppo", TWICE | {"value_clip": 10.0}, steps=80, bar="pass@1 ≥ 0.99"),
    "On-policy distillation": Check("reverse", "opd", steps=100, teacher=True, bar="pass@1 ≥ 0.99"),
    "SFT, then GRPO, calculator": Check(
        "calculate", algo=TWICE, steps=100, rollout={"environment": {"use": "ptf.tasks.calculator:Calculator"}, "max_new_tokens": 4}
    ),
    "control: targets shuffled": Check("shuffled", algo=TWICE, bar="reward < 0.15"),
    "control: advantages flipped": Check("count", {"use": "benchmarks.learning_rl:Flipped", "args": {}}, TWICE | {"temperature": 1.0}, bar="reward < 0.15"),
    "control: weights never synced": Check("count", algo=TWICE, steps=5, bar="stopped at its first sync"),
    "control: mask off by one": Check("count", algo=TWICE, steps=5, bar="stopped at its first step"),
}


def met(bar: str, found: Mapping[str, Any]) -> bool:
    if bar.startswith("stopped"):
        return found["stopped"]
    if bar == "reward reaches 0.95":
        return found["reached"] is not None
    name, sign, number = bar.split()
    value = found["pass@1" if name == "pass@1" else "reward"]
    return value >= float(number) if sign == "≥" else value < float(number)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


class Seed:
    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        rng = np.random.default_rng(seed)
        write_model(place / "model", "0123456789", dim=64, layers=2)
        counts = [asked(str(i % 10), "".join(str((i + k) % 10) for k in range(1, 5))) for i in range(640)]
        answers = rng.permutation([row["answer"] for row in counts]).tolist()
        numbers = [f"{n:06}" for n in rng.permutation(10**6)[:20_200].tolist()]
        turned = [asked(n, n[::-1]) for n in numbers]
        calculator.prepare(str(place / "calculate"))
        self.files = {
            "count": (write_rows(place / "count.jsonl", counts), write_rows(place / "count_test.jsonl", counts[:10])),
            "shuffled": (
                write_rows(place / "shuffled.jsonl", [row | {"answer": a} for row, a in zip(counts, answers, strict=True)]),
                str(place / "count_test.jsonl"),
            ),
            "reverse": (write_rows(place / "reverse.jsonl", turned[:-200]), write_rows(place / "reverse_test.jsonl", turned[-200:])),
            "calculate": (str(place / "calculate" / "train.jsonl"), str(place / "calculate" / "test.jsonl")),
        }
        reversals = [{"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in turned[:-200]]
        self.chats = {"reverse": write_rows(place / "reversals.jsonl", reversals), "calculate": str(place / "calculate" / "calls.jsonl")}

    def raw(self, model: Path, steps: int, lr: float) -> dict[str, Any]:
        return {
            "output": str(self.place / "runs"), "seed": self.seed, "data": {"seq_len": 128},
            "model": {"path": str(model), "init": "pretrained" if (model / "model.safetensors").exists() else "random"},
            "train": {"steps": steps, "lr": lr, "precision": "fp32", "schedule": "constant", "rows": 8},
            "compute": {"launcher": "local", "device": "cpu", "threads": 1}, "track": {"tensorboard": False, "print_every": 1000},
            "checkpoint": {"every": 10_000},
        }  # fmt: skip

    def imitated(self, steps: int, task: str) -> Path:
        """SFT on right answers for so many steps."""
        raw = self.raw(self.place / ("calculate" if task == "calculate" else "") / "model", steps, 2e-3) | {"recipe": "sft"}
        raw["data"] = {"seq_len": 128, "sources": {"chats": {"path": self.chats[task]}}}
        return self.run(raw, f"sft-{task}-{steps}") / "model"

    def run(self, raw: Mapping[str, Any], name: str) -> Path:
        made = self.place / "runs" / name
        if not (made / "model" / "model.safetensors").exists():
            with contextlib.redirect_stdout(sys.stderr):
                run(loads(yaml.safe_dump(dict(raw))), name)
        return made

    def check(self, name: str, check: Check) -> dict[str, Any]:
        """The mean reward of the last ten steps, greedy pass@1 on held-out prompts before and after, and whether a check of the weights stopped it."""
        start = self.place / "model" if check.task in ("count", "shuffled") else self.imitated(STOPPED[check.task], check.task)
        train, test = self.files[check.task]
        raw = self.raw(start, check.steps, check.lr) | {"recipe": check.recipe, "algo": dict(check.algo)}
        if check.teacher:
            raw["algo"]["teacher"] = str(self.imitated(TAUGHT, check.task))
        raw["model"] |= check.model
        raw["data"]["sources"] = {"prompts": {"path": train, "kind": "prompt"}}
        raw["rollout"] = {"engine": "native", "prompts": 32, "group": 8, "max_new_tokens": 4 if check.task != "reverse" else 7, **check.rollout}
        if "environment" not in raw["rollout"]:
            raw["rollout"]["reward"] = {"use": "ptf.rl.rewards:exact" if check.task == "reverse" else "benchmarks.learning_rl:share"}
        raw["evaluate"] = {"sources": {"test": {"path": test, "kind": "prompt"}}, "max_new_tokens": raw["rollout"]["max_new_tokens"]}
        raw["train"]["validate_every"] = check.steps
        label, faulty = "".join(c if c.isalnum() else "_" for c in name), contextlib.ExitStack()
        with faulty:
            if name == "control: mask off by one":
                faulty.enter_context(patched(controller, "samples_of", shifted(controller.samples_of)))
            if name == "control: weights never synced":
                faulty.enter_context(patched(LocalGroup, "call", unsynced(LocalGroup.call)))
            try:
                made = self.run(raw, label)
            except SyncError as error:
                at = len(read_metrics(self.place / "runs" / label / "metrics.jsonl"))
                return {"stopped": at == 0, "reached": None, "said": str(error), "reward": float("nan"), "pass@1": float("nan"), "steps": at}
        rows = read_metrics(made / "metrics.jsonl")
        reached = next((i + 1 for i in range(len(rows)) if np.mean([r["reward"] for r in rows[max(0, i - 9) : i + 1]]) >= 0.95), None)
        return {"stopped": False, "reward": float(np.mean([r["reward"] for r in rows[-10:]])), "pass@1": rows[-1]["pass@1/test"], "reached": reached,
                "first": rows[0]["reward"]}  # fmt: skip


STOPPED, TAUGHT = {"reverse": 60, "calculate": 40}, 400  # steps of SFT: of the model to go on from, and of the teacher


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks alone; nothing is written")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted.only or CHECKS}
    began = time.perf_counter()
    for seed in wanted.seeds:
        with tempfile.TemporaryDirectory() as directory:
            made = Seed(Path(directory), seed)
            for name in found:
                start = time.process_time()
                found[name].append(made.check(name, CHECKS[name]))
                print(json.dumps({"seed": seed, "check": name, **found[name][-1], "cpu_s": round(time.process_time() - start, 1)}), flush=True)
    missed = sum(not met(CHECKS[name].bar, one) for name, of in found.items() for one in of)
    if not wanted.only:
        write(found, wanted.seeds, " ".join(["benchmarks/learning_rl.py", *sys.argv[1:]]), time.perf_counter() - began)
    print(f"{missed} missed")
    return 1 if missed else 0


def write(found: Mapping[str, Sequence[Mapping[str, Any]]], seeds: Sequence[int], command: str, spent: float) -> None:
    lines = [f"| check | task | bar | {' | '.join(f'seed {seed}' for seed in seeds)} | |", "|---|---|---|" + "---|" * (len(seeds) + 1)]
    for name, of in found.items():
        check = CHECKS[name]
        cells = " | ".join(shown(check.bar, one) for one in of)
        lines.append(f"| {name} | {check.task} | {check.bar}, {check.steps} steps | {cells} | {sum(met(check.bar, one) for one in of)} of {len(of)} |")
    RESULTS.write_text(
        "# Learning checks of on-policy training\n\n"
        f"Command: `python {command}` (part of `make learning`)  \nHardware: {cpu()}, one thread, no GPU  \n"
        f"Date: {time.strftime('%Y-%m-%d')}, {spent / 60:.0f} minutes in all\n\n"
        "One Qwen3 shape of 2 layers of 64, our own decoder as the engine; 32 prompts with 8 answers each in a step.\n\n"
        "* `count`: from random weights, the next four digits after one; the reward is the share of them that is right.\n"
        "* `reverse`: six digits turned round, from a model that SFT was stopped on after "
        f"{STOPPED['reverse']} steps; the reward is 1 for the right answer. 200 held-out numbers.\n"
        f"* `calculate`: an agent that has to ask a calculator and to say what it answered, from SFT that was stopped after {STOPPED['calculate']} steps.\n\n"
        "`at step` is the first at which the mean reward of ten steps is 0.95; a reward by itself is the mean of the last ten steps; pass@1 is greedy, on\n"
        "held-out prompts, at the end. `shuffled`: every prompt has another's targets. Controls must fail as their bar says.\n\n" + "\n".join(lines) + "\n"
    )  # fmt: skip
    print(f"wrote {RESULTS.relative_to(ROOT)}")


def shown(bar: str, one: Mapping[str, Any]) -> str:
    if bar.startswith("stopped"):
        return "stopped" if one["stopped"] else "went on"
    if bar.startswith("pass@1"):
        return f"{one['pass@1']:.3f}"
    return f"at step {one['reached']}" if one["reached"] is not None and "reaches" in bar else f"{one['reward']:.3f}"


if __name__ == "__main__":
    from benchmarks import learning_rl  # plugs are resolved by that name

    sys.exit(learning_rl.main())
