"""The GRPO step beside TRL's GRPOTrainer, in one interleaved run (A, B, A, B, …): CPU-seconds of one thread for a whole
step, from prompts to new weights in the engine, with as many sampled tokens on both sides.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/grpo_step.py [--cases equal log-normal agents] [--dtypes fp32 bf16] [--rounds 3]

8 prompts of 64 tokens, 8 responses to each; one optimizer step, AdamW, no reference; the reward is a number from the
response. Three cases of lengths, which both sides are made to keep: 128 tokens for all; log-normal ones (σ = 1, mean
about 128, at most 512); agents, whose episodes have 4 turns of 32 tokens, with 16 tokens of an environment between
them (ptf: `rollout.environment`, in a process of its own, whose CPU-seconds are not counted; TRL: `rollout_func` and
its `env_mask`). ptf runs its controller as `ptf train` does with `launcher: local`
and the native engine: a step of it also compares the trainer's log-probs of every answer with the engine's (in the
update), and sends checked weights to an engine that is a model of its own. TRL generates with the model that it trains;
it is tried with several passes of the update, in bf16 at the fastest also with weights of bf16 in place of fp32 under
autocast, then at the fastest with a static cache, with eager attention, and except for agents with transformers'
continuous batching: its defaults, and 8 or 16 requests at once in small pages. What a library refuses is kept with the
library's own words. TRL's processes keep what they free, as those of ptf do by themselves.
Prints a JSON line a round, keeps it in results/grpo_step.jsonl, and writes results/grpo_step.md from the newest
complete call for each case and type on this CPU.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu
from pages import here, keep, kept, spread, told
from train_grid import HEADS, KEPT_HEAP, MODELS, OF_HEAP
from train_step import asked_of, round_of, start

RESULTS = ROOT / "benchmarks" / "results" / "grpo_step.md"
KEPT = RESULTS.with_suffix(".jsonl")
TRL = "TRL" + KEPT_HEAP
PROMPTS, GROUP, TOKENS, LONGEST, READ, LR = 8, 8, 128, 512, 64, 1e-5
WORDS, SPECIAL = 4096, ("<pad>", "<eos>")
RESPONSES = PROMPTS * GROUP
# responses of a pass of TRL's update. Where lengths differ, generation is most of its step, whatever the pass
PASSES = {"equal": (64, 16, 4), "log-normal": (64, 8), "agents": (64, 16, 4)}
PAGES = {"page_size": 32, "num_blocks": 512}  # of a cache for 16 requests of 576 tokens and more
GENERATION: dict[str, dict[str, Any]] = {
    "static cache": {"cache": "static"},
    "eager attention": {"attention": "eager"},
    "static cache, eager attention": {"cache": "static", "attention": "eager"},
    "continuous batching": {"continuous": {}},
    "continuous batching of 16": {"continuous": {"max_requests_per_batch": 16, **PAGES}},
    "continuous batching of 8": {"continuous": {"max_requests_per_batch": 8, **PAGES}},
}
TURNS, SAID, OBSERVED = 4, 32, 16  # of an agent: turns, sampled tokens of each, tokens of the environment after it
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ ' ' + eos_token if m.role == 'assistant' else '' }} {% endfor %}"


def tokenizer(directory: str, size: int = WORDS) -> None:
    """A word for each id, beside the model: a number, or for the first two a special token that is part of no number.

    Raises AssertionError where a prompt or an observation is not of as many tokens as it has words.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *map(str, range(len(SPECIAL), size))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0]))
    made.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    hf = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[0], padding_side="left"
    )
    hf.chat_template = TEMPLATE
    hf.save_pretrained(directory)
    assert {len(ids) for ids in hf(texts(1))["input_ids"]} == {READ}
    assert len(hf(observation(np.random.default_rng(0)))["input_ids"]) == OBSERVED


def texts(steps: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(map(str, rng.integers(2, WORDS, READ))) for _ in range(PROMPTS * steps)]


def lengths(case: str, steps: int) -> list[list[int]]:
    """How many tokens each response of a step has; agents: in all turns."""
    assert TURNS * SAID == TOKENS
    if case != "log-normal":
        return [[TOKENS] * RESPONSES] * steps
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(TOKENS) - 0.5, 1.0, (steps, RESPONSES))
    return np.clip(drawn, 4, LONGEST).astype(int).tolist()


def reward(row: dict[str, Any], text: str) -> float:
    return float(len(text) % 7)


class Talking:
    """An environment that says a few words after each turn of the policy."""

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.row, self.words, self.turns = row, np.random.default_rng(seed), 0

    def reset(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.row["prompt"]}]

    def step(self, text: str) -> Any:
        from ptf.rl.environments.protocol import StepResult

        self.turns += 1
        if self.turns == TURNS:
            return StepResult(reward=reward(self.row, text), done=True)
        return StepResult([{"role": "user", "content": observation(self.words)}])


def observation(words: np.random.Generator) -> str:
    """What an environment says."""
    return " ".join(map(str, words.integers(2, WORDS, OBSERVED)))


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: a run, with the clock read at the end of every step."""
    from ptf.compute.tracking import Tracker
    from ptf.config import loads
    from ptf.data.tokenizer import Tokenizer
    from ptf.data.trajectory import Generation
    from ptf.rl.engines.native import NativeEngine
    from ptf.rl.engines.protocol import Request
    from ptf.run import run

    ends: list[float] = []
    rows: list[dict[str, float]] = []
    log = Tracker.log

    def timed(self: Tracker, step: int, metrics: dict[str, float]) -> None:
        ends.append(time.process_time())
        rows.append(metrics)
        log(self, step, metrics)

    answer, of_steps, contexts = NativeEngine.answer, iter(given["lengths"]), list[int]()
    agents = given["case"] == "agents"

    def of_lengths(self: NativeEngine, requests: Sequence[Request]) -> list[Generation]:
        """Sample a step's responses, whose lengths are given; those of agents have one length."""
        if len(requests) != given["responses"]:
            return answer(self, requests)
        contexts.append(sum(len(one.context) for one in requests))
        if agents:
            return answer(self, requests)
        limited = [
            replace(one, sampling=replace(one.sampling, max_new_tokens=n))
            for one, n in zip(requests, next(of_steps), strict=True)
        ]
        return answer(self, limited)

    NativeEngine.answer = of_lengths  # type: ignore[method-assign]
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
                "prompts_per_step": given["responses"] // given["group"],
                "group_size": given["group"],
                "max_new_tokens": SAID if agents else max(map(max, given["lengths"])),
                "max_turns": TURNS,
                **(
                    {"environment": {"use": "grpo_step:Talking"}} if agents else {"reward": {"use": "grpo_step:reward"}}
                ),
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
    assert agents or next(of_steps, None) is None, "every step had the lengths that were given"
    steps = [b - a for a, b in pairwise(ends)][-given["steps"] :]
    timed_rows = rows[-given["steps"] :]
    spent = {
        name: float(np.mean([row.get(f"seconds/{name}", 0.0) for row in timed_rows]))
        for name in ("rollout", "logprobs", "update", "sync")
    }
    sampled = [int(row["sampled_tokens"]) for row in timed_rows]
    print(json.dumps({"cpu_s": steps, "tokens": sampled, "contexts": sum(contexts), "seconds": spent}))


def compare(case: str, dtype: str, model: str, asked: argparse.Namespace) -> None:
    """Run rounds of ptf and of each of TRL's settings, of all but the fastest of these one, and keep them.

    Raises AssertionError where one samples other numbers of tokens than it was given, or reads other contexts.
    """
    written = asked.steps + asked.warmup
    given = {
        "model": model,
        "texts": texts(written + 1),
        "lengths": lengths(case, written),
        "case": case,
        "turns": [TURNS, SAID] if case == "agents" else None,
        "observations": [observation(np.random.default_rng(i)) for i in range(RESPONSES)],
        "responses": RESPONSES,
        "group": GROUP,
        "dtype": dtype,
        "lr": LR,
        "steps": asked.steps,
        "warmup": asked.warmup,
        "written": written,
    }
    expected = [sum(of_step) for of_step in given["lengths"][asked.warmup :]]
    found: dict[str, list[dict[str, Any]]] = {}
    about = {**here(), "began": time.time(), "steps": [asked.warmup, asked.steps], "rounds": asked.rounds}

    def add(system: str, number: int, cell: dict[str, Any]) -> None:
        """Run a round, and keep it if it sampled what was asked and read contexts as long as ptf's."""
        one = given | {"seed": number, "weights": "fp32", "attention": "sdpa", "cache": None, "continuous": None} | cell
        made = round_of(
            "ptf" if system == "ptf" else TRL, one, "benchmarks/grpo_step.py", "benchmarks/peers/trl_grpo.py"
        )
        if "refused" not in made:
            assert made["tokens"] == expected, f"{system} sampled {made['tokens']} tokens, not {expected}"
            ours = found["ptf"][0]["contexts"] if found else made["contexts"]
            # ptf's template ends the turns of agents, one token each
            assert 0 <= ours - made["contexts"] <= (ours // READ if case == "agents" else 0), (ours, made["contexts"])
        row = {"case": case, "dtype": dtype, "system": system, "round": number, **made}
        print(json.dumps(row), flush=True)
        keep(KEPT, row | about)
        found.setdefault(system, []).append(made | {"cell": cell})

    add("ptf", 0, {})
    for n in PASSES[case]:
        add(f"TRL, {n} responses a pass", 0, {"pass": n})
    best = fastest(found)
    if dtype == "bf16":
        add(f"{best}, weights of bf16", 0, found[best][0]["cell"] | {"weights": "bf16"})
    best = fastest(found)
    for name, cell in GENERATION.items():
        if case != "agents" or "continuous" not in cell:
            add(f"{best}, {name}", 0, found[best][0]["cell"] | cell)
    best = fastest(found)
    for number in range(1, asked.rounds):
        for system in ("ptf", best):
            add(system, number, found[system][0]["cell"])


def fastest(found: dict[str, list[dict[str, Any]]]) -> str:
    """TRL's setting that takes least in its first round."""
    served = [system for system, (first, *_) in found.items() if system != "ptf" and "refused" not in first]
    return min(served, key=lambda system: median(found[system][0]["cpu_s"]))


def newest() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rounds of the newest complete call on this CPU for each case and type."""
    calls: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    for row in kept(KEPT):
        calls.setdefault((row["began"], row["case"], row["dtype"]), []).append(row)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in calls.values():
        last = max(rows, key=lambda row: row["round"])
        whole = sum(row["round"] == last["round"] for row in rows) > 1 and last["round"] + 1 == last["rounds"]
        if whole and last["hardware"] == cpu():
            found[last["case"], last["dtype"]] = rows
    return found


def lines_of(case: str, dtype: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row for each of TRL's settings, beside the rounds of ptf of the same minutes."""
    refused = {system: rounds[0]["refused"] for system, rounds in found.items() if "refused" in rounds[0]}
    spent = {
        system: [median(one["cpu_s"]) for one in rounds] for system, rounds in found.items() if system not in refused
    }
    best = fastest(found)

    cell = partial(spread, form=".2f")
    lines = []
    for system, theirs in list(spent.items())[1:]:
        ours = spent["ptf"][: len(theirs)]
        ratios = cell([b / a for a, b in zip(ours, theirs, strict=True)])
        names = ("**" + system + "**", f"**{ratios}**") if system == best else (system, ratios)
        parts = ", ".join(
            f"{name} {median(one['seconds'][name] for one in found['ptf'][: len(theirs)]):.2f}"
            for name in found["ptf"][0]["seconds"]
        )
        lines.append(f"| {case} | {dtype} | {names[0]} | {cell(ours)} | {cell(theirs)} | {names[1]} | {parts} |")
    for system, words in refused.items():
        lines.append(f"| {case} | {dtype} | {system} | | refused: {words.replace('|', '/')} | | |")
    return lines


def write() -> None:
    lines, calls = list[str](), newest()
    for case in PASSES:
        for dtype in ("fp32", "bf16"):
            if rows := calls.get((case, dtype)):
                by_system: dict[str, list[dict[str, Any]]] = {}
                for row in rows:
                    by_system.setdefault(row["system"], []).append(row)
                lines += lines_of(case, dtype, by_system)
    every = [row for rows in calls.values() for row in rows]
    rounds = min(max(row["round"] for row in rows) + 1 for rows in calls.values())
    warmup, steps = min(row["steps"] for row in every)
    RESULTS.write_text(
        "# The GRPO step beside TRL\n\n"
        "Command: `python benchmarks/grpo_step.py` (`make peers bench-grpo`)  \n"
        f"Hardware: {cpu()}, one thread, no GPU  \nDate: {told(every, 'date')}  \nCommit: {told(every, 'commit')}\n\n"
        f"Interleaved rounds ({rounds} of ptf and of TRL's fastest setting, which stands in bold; one of its "
        f"others), {steps} timed {'steps' if steps > 1 else 'step'} a round or more, after {warmup} of\n"
        f"warm-up: {PROMPTS} prompts of {READ} tokens, {GROUP} responses to each; one optimizer step of AdamW; no "
        f"reference. Lengths of responses, given to both: *equal*: {TOKENS} tokens;\n"
        f"*log-normal*: σ = 1, mean about {TOKENS}, at most {LONGEST}, of which TRL's generation waits for the "
        "longest, except with transformers'\n*continuous batching* (its defaults, or so many requests at once in pages "
        "of 32 tokens; its cache is of bf16 in bf16; not tried with agents). "
        f"*Agents*: episodes of {TURNS} turns of {SAID} tokens, {OBSERVED} tokens of an environment between them (ptf: "
        "`rollout.environment`, a process of its own that\nis not counted; TRL: `rollout_func`, its observations as "
        "ids from the start). ptf computes equal contexts once, in generation and in the update\n"
        f"(the prompt of a group, {READ} of {READ + TOKENS} tokens of a response of *equal*), TRL each; the contexts "
        "of later turns both compute anew. `small4`: Qwen3 shape, width 256,\n"
        f"4 layers, {HEADS}, vocabulary 4,096. CPU-seconds of the training process, from the end of one step to that "
        "of the next; median of the rounds, each the median\n"
        "of its steps, with the range. ptf: the whole controller (native engine, the trainer's log-probs compared with "
        "the engine's, a checked weight sync),\n"
        "with the wall-clock seconds of its phases beside it; sequences of 2,048 tokens, a sequence a pass. TRL: "
        "GRPOTrainer, versions in\n"
        "`benchmarks/requirements-peers.txt`; it generates with the model that it trains; what a pass of the update "
        "does not hold is accumulated; in bf16,\n"
        "weights of fp32 under autocast, and the fastest of these with weights of bf16; then the fastest with other "
        "caches, attention and batches; *heap kept* in all rounds. "
        f"{OF_HEAP}\n\n"
        "| lengths | dtype | beside | ptf, CPU-s a step | theirs | times ours | ptf's phases, s |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    asked = asked_of(__doc__, cases=list(PASSES))
    with tempfile.TemporaryDirectory() as directory:
        model = start(Path(directory), MODELS["small4"])
        tokenizer(model)
        for case in asked.cases:
            for dtype in asked.dtypes:
                compare(case, dtype, model, asked)
                write()


if __name__ == "__main__":
    main()
