"""The GRPO step beside TRL's GRPOTrainer, in one interleaved run (A, B, A, B, …): CPU-seconds of one thread for a whole
step, from prompts to new weights in the engine, with as many sampled tokens on both sides.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/grpo_step.py [--dtypes fp32 bf16] [--rounds 3]

8 prompts of 64 tokens, 8 answers of 128 tokens to each, which are made not to end early; one optimizer step, AdamW, no
reference; the reward is a number from the answer. ptf runs its controller as `ptf train` does with `launcher: local`
and the native engine: a step of it also compares the trainer's log-probs of every answer with the engine's (in the
update), and sends checked weights to an engine that is a model of its own. TRL generates with the model that it trains;
in bf16 once with weights of fp32 (autocast) and once with all of bf16.
Prints a JSON line a round and writes results/grpo_step.md.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from dpo_step import start
from flow_runs import ROOT, cpu
from train_step import HEADS, MODELS, PEER, round_of

RESULTS = ROOT / "benchmarks" / "results" / "grpo_step.md"
PROMPTS, GROUP, TOKENS, READ, LR = 8, 8, 128, 64, 1e-5
WORDS = 4096
SYSTEMS = {"ptf": {}, "TRL": {}, "TRL, 8 answers a pass": {"answers": 8}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ ' ' + eos_token if m.role == 'assistant' else '' }} {% endfor %}"


def tokenizer(directory: str) -> None:
    """A word for each id, beside the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    made.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens(["0", "1"])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="0", eos_token="1", unk_token="0", padding_side="left"
    )
    hf.chat_template = TEMPLATE
    hf.save_pretrained(directory)


def texts(steps: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(map(str, rng.integers(2, WORDS, READ))) for _ in range(PROMPTS * steps)]


def reward(row: dict[str, Any], text: str) -> float:
    return float(sum(map(int, text.split())) % 7)


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: a run, with the clock read at the end of every step."""
    from ptf.compute.tracking import Tracker
    from ptf.config import loads
    from ptf.data.tokenizer import Tokenizer
    from ptf.run import run

    ends: list[float] = []
    rows: list[dict[str, float]] = []
    log = Tracker.log

    def timed(self: Tracker, step: int, metrics: dict[str, float]) -> None:
        ends.append(time.process_time())
        rows.append(metrics)
        log(self, step, metrics)

    Tracker.log = timed  # type: ignore[method-assign]
    Tokenizer.stop_ids = property(lambda self: ())  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as out:
        data = Path(out) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in given["texts"]))
        raw = {
            "recipe": "grpo",
            "output": out,
            "seed": given["seed"],
            "model": {"path": given["model"]},
            "data": {"sources": {"prompts": {"path": str(data), "kind": "prompt"}}, "shuffle_buffer": 0},
            "rollout": {
                "engine": "native",
                "prompts_per_step": PROMPTS,
                "group_size": GROUP,
                "max_new_tokens": TOKENS,
                "reward": {"use": "grpo_step:reward"},
            },
            "train": {
                "steps": given["steps"] + given["warmup"],
                "lr": LR,
                "schedule": "constant",
                "micro_batch_sequences": 1,
                "precision": given["dtype"],
                "betas": [0.9, 0.999],
            },
            "compute": {"launcher": "local", "device": "cpu", "threads": 1},
            "track": {"tensorboard": False},
            "checkpoint": {"every": 10_000},
        }
        with contextlib.redirect_stdout(sys.stderr):
            run(loads(json.dumps(raw)), "a")
    steps = [b - a for a, b in pairwise(ends)][-given["steps"] :]
    spent = {
        name: float(np.mean([r.get(f"seconds/{name}", 0.0) for r in rows[-given["steps"] :]]))
        for name in ("rollout", "logprobs", "update", "sync")
    }
    print(
        json.dumps(
            {"cpu_s": steps, "tokens": [int(r["sampled_tokens"]) for r in rows[-given["steps"] :]], "seconds": spent}
        )
    )


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/grpo_step.py needs the peer's environment: make peers")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        model = start(Path(directory), MODELS["small4"])
        tokenizer(model)
        for dtype in asked.dtypes:
            given = {
                "model": model,
                "texts": texts(asked.steps + asked.warmup + 1),
                "prompts_per_step": PROMPTS,
                "group": GROUP,
                "tokens": TOKENS,
            }
            given |= {"dtype": dtype, "lr": LR, "steps": asked.steps, "warmup": asked.warmup}
            systems = SYSTEMS | ({"TRL, weights of bf16": {"weights": "bf16"}} if dtype == "bf16" else {})
            found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
            for number in range(asked.rounds):
                for system, rounds in found.items():
                    one = given | {"seed": number, "weights": "fp32", "answers": PROMPTS * GROUP} | systems[system]
                    rounds.append(round_of(system[:3], one, "benchmarks/grpo_step.py", "benchmarks/peers/trl_grpo.py"))
                    print(json.dumps({"dtype": dtype, "system": system, "round": number, **rounds[-1]}), flush=True)
            lines.append(summary(dtype, found))
            print(lines[-1], flush=True)
    write(lines, "python " + " ".join(["benchmarks/grpo_step.py", *sys.argv[1:]]), asked)


def summary(dtype: str, found: dict[str, list[dict[str, Any]]]) -> str:
    for rounds in found.values():
        for r in rounds:
            assert set(r["tokens"]) == {PROMPTS * GROUP * TOKENS}, "all sample the same number of tokens"
    spent = {system: [median(r["cpu_s"]) for r in rounds] for system, rounds in found.items()}

    def cell(values, digits):
        return f"{median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"

    parts = ", ".join(
        f"{name} {median(r['seconds'][name] for r in found['ptf']):.2f}" for name in found["ptf"][0]["seconds"]
    )
    lines = []
    for system in list(found)[1:]:
        ratios = [theirs / ours for ours, theirs in zip(spent["ptf"], spent[system], strict=True)]
        lines.append(
            f"| {dtype} | {system} | {cell(spent['ptf'], 2)} | {cell(spent[system], 2)} | "
            f"**{cell(ratios, 2).replace(' (', '** (', 1)} | {parts} |"
        )
    return "\n".join(lines)


def write(lines: list[str], command: str, asked: argparse.Namespace) -> None:
    RESULTS.write_text(
        "# The GRPO step beside TRL\n\n"
        f"Command: `{command}`  \nHardware: {cpu()}, one thread, no GPU  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"Interleaved rounds ({asked.rounds} of each), {asked.steps} timed steps a round after {asked.warmup} of "
        f"warm-up: {PROMPTS} prompts of {READ} tokens,\n"
        f"{GROUP} answers of {TOKENS} tokens to each, none of which ends early; one optimizer step of AdamW; "
        "no reference. `small4`: Qwen3 shape, width 256,\n"
        f"4 layers, {HEADS}, vocabulary 4,096. CPU-seconds of the training process, "
        "from the end of one step to that of the next; median of the rounds, each the median\n"
        "of its steps, with the range. ptf: the whole controller (native engine, "
        "the trainer's log-probs compared with the engine's, a checked weight sync),\n"
        "with the wall-clock seconds of its phases beside it; sequences of 2,048 tokens, a sequence a pass. "
        "TRL: GRPOTrainer, "
        "versions in\n"
        "`benchmarks/requirements-peers.txt`; it generates with the model that it trains; "
        "all answers in one pass of the update, and 8 a pass (gradient\n"
        "accumulation); in bf16, weights of fp32 under autocast, and weights of bf16.\n\n"
        "| type | beside | ptf, CPU-s a step | theirs | times ours | ptf's phases, s |\n|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
