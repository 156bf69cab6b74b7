"""Rollouts in flight with a real engine on two cores, beside the model of them. Writes results/in_flight_engine.md.

    python benchmarks/in_flight_engine.py [--steps 12] [--rounds 3]

A GRPO job on a local Ray cluster: policy and native engine in pools of their own, a process and a thread each. The
model has random weights and a learning rate of nearly zero, so it ends a response with the same probability at every
token: lengths are geometric (mean and limit in the page), as far apart as log-normal ones with σ = 0.83. The model of
it is the scheduler of benchmarks/in_flight.py with costs that are measured first: seconds of a decoding step, of each
response in it, of a token of a context (the native engine alone), and of an update (the run with k = 0).
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from benchmarks.in_flight import Costs, Work, measured  # noqa: E402
from benchmarks.pages import write_page  # noqa: E402
from ptf.compute.ray_session import ray_session  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.data.character_tokenizer import character_tokenizer  # noqa: E402
from ptf.rl.engines.native import NativeEngine  # noqa: E402
from ptf.rl.engines.protocol import Request, Sampling  # noqa: E402
from ptf.run import run  # noqa: E402

PAGE = results_page("in_flight_engine.md")
PROMPTS, GROUP, MOST = 16, 8, 480
KS = (0, 1, 2, 4)
SLICE = 60  # tokens of a slice, about the mean length
WARM = 3  # steps that are not counted: the first begin with nothing in flight
CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def reward(row: Mapping[str, Any], text: str) -> float:
    """Return a reward that differs within a group and costs nothing."""
    return (len(text) % 7) / 7


def job(directory: Path) -> dict[str, Any]:
    """Write model, tokenizer and prompts; return the job, with k = 0."""
    tokenizer = character_tokenizer(CHARACTERS, directory / "model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": 512,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.005,  # logits near zero: every token, also the last, has nearly the same probability
        "torch_dtype": "float32",
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.stop_ids[0],
        "hidden_act": "silu",
    }
    (directory / "model" / "config.json").write_text(json.dumps(config))
    rows = [{"messages": [{"role": "user", "content": f"{i}+{i}="}], "answer": "1"} for i in range(500)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "recipe": "grpo",
        "output": str(directory / "runs"),
        "seed": 1,
        "model": {"path": str(directory / "model"), "init": "random"},
        "data": {"sources": {"p": {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}}, "seq_len": 512},
        "rollout": {
            "engine": "native",
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_new_tokens": MOST,
            "reward": {"use": "benchmarks.in_flight_engine:reward"},
        },
        "train": {"lr": 1e-9, "weight_decay": 0.0, "schedule": "constant", "precision": "fp32"},
        "compute": {
            "launcher": "ray",
            "workers": 1,
            "threads": 1,
            "device": "cpu",
            "pools": {"training": {"roles": ["policy"]}, "sampling": {"roles": ["rollout"]}},
        },
        "checkpoint": {"every": 1000},
        "track": {"tensorboard": False},
    }


def asynchronous(k: int) -> dict[str, Any]:
    """Return the keys of `rollout` for a staleness."""
    if not k:
        return {}
    in_flight = PROMPTS + PROMPTS * k // 2
    return {"max_staleness": k, "slice_tokens": SLICE, "update_slices": 1, "in_flight": in_flight}


def timed(raw: dict[str, Any], k: int, steps: int, name: str) -> dict[str, float]:
    """Return means over the steps of a run after the first WARM: seconds, and the metrics of waits and ages."""
    raw = {**raw, "rollout": {**raw["rollout"], **asynchronous(k)}, "train": {**raw["train"], "steps": steps}}
    rows = read_metrics(run(loads(yaml.safe_dump(raw)), name) / "metrics.jsonl")[WARM:]
    names = ["step_s", "seconds/rollout", "seconds/update", "seconds/sync", "seconds/logprobs", "seconds/engine_wait"]
    names += ["staleness", "staleness_max", "response_length", "slice_occupancy"]
    return {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}


def costs(model: Path) -> Costs:
    """Measure the native engine alone: decoding of 8 and of 128 responses, and contexts of 8 and of 256 tokens."""
    torch.set_num_threads(1)
    engine = NativeEngine(str(model), device=torch.device("cpu"), dtype=torch.float32, version=0, batch=128)

    def seconds(requests: int, context: int, tokens: int) -> float:
        rng = np.random.default_rng(0)
        asked = [
            Request(rng.integers(0, 60, context).astype(np.int32), Sampling(tokens, 1.0, ()), i)
            for i in range(requests)
        ]

        async def answer() -> None:
            await asyncio.gather(*map(engine.generate, asked))

        took = []
        for _ in range(3):
            began = time.perf_counter()
            asyncio.run(answer())
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    few, many = ((seconds(n, 8, 161) - seconds(n, 8, 1)) / 160 for n in (8, 128))
    response = (many - few) / 120
    context = (seconds(128, 256, 1) - seconds(128, 8, 1)) / (128 * 248)
    return Costs(max(0.0, few - 8 * response), response, context)


def randomised(raw: dict[str, Any], directory: Path) -> Path:
    """Return a directory with the job's model and random weights, for the engine alone."""
    one = {**raw, "train": {**raw["train"], "steps": 1}, "compute": {"launcher": "local", "device": "cpu"}}
    return run(loads(yaml.safe_dump({**one, "output": str(directory / "first")})), "first") / "model"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of rounds, with their range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def main() -> int:
    """Run all k in turn, several rounds, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        raw = job(directory)
        engine = costs(randomised(raw, directory))
        found: dict[int, list[dict[str, float]]] = {k: [] for k in KS}
        with ray_session(workdir=directory / "ray", cpus=4, timeout_s=600):
            for n in range(options.rounds):
                for k in KS:
                    found[k].append(timed(raw, k, options.steps + WARM, f"k{k}-{n}"))
                    print(f"round {n}, k = {k}: {found[k][-1]}", flush=True)
    return page(engine, found, options.steps)


def page(engine: Costs, found: Mapping[int, list[dict[str, float]]], steps: int) -> int:
    """Write the page of what was found by k; ends with status 1 if an age is above k."""

    def median(k: int, name: str) -> float:
        return statistics.median(one[name] for one in found[k])

    work = Work(PROMPTS, GROUP, median(0, "response_length"), MOST, geometric=True)
    update = median(0, "step_s") - median(0, "seconds/rollout")
    lines, missed, base = [], [], measured(engine, 0, 60, MOST, update, 0, work=work)["seconds"]
    for k in KS:
        model = measured(engine, k, 60, SLICE if k else MOST, update, min(k, 1), work=work)["seconds"]
        gains = [zero["step_s"] / one["step_s"] for zero, one in zip(found[0], found[k], strict=True)]
        waits = [one["seconds/engine_wait"] / one["step_s"] for one in found[k]]
        lines.append(
            f"| {k} | {spread([one['step_s'] for one in found[k]])} | {spread(gains)} | {model:.2f} | "
            f"{base / model:.2f} | {statistics.median(waits) if k else update / median(0, 'step_s'):.0%} | "
            f"{median(k, 'staleness'):.2f} | {max(one['staleness_max'] for one in found[k]) if k else 0:.0f} |"
        )
        if k and max(one["staleness_max"] for one in found[k]) > k:
            missed.append(f"k = {k}: a group was older")
    about = (
        "# Rollouts in flight: a real engine on two cores, and the model of it\n\n"
        "Command: `python benchmarks/in_flight_engine.py` (`make bench-in-flight-engine`)  \n"
        f"Hardware: {cpu()}, a core for the policy and one for the engine, no GPU  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}\n\n"
        + (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].rstrip()
        + f"\n\n{PROMPTS} prompts × {GROUP} responses of {work.mean:.0f} tokens on average, at most {MOST}; slices of "
        f"{SLICE} tokens, one beside\nan update, {PROMPTS} × (1 + k/2) prompts in flight; {steps} steps a run, rounds "
        f"in turn, median (range). Measured costs: a decoding step\n{engine.step * 1e3:.2f} ms and "
        f"{engine.response * 1e6:.0f} µs a response, a token of a context {engine.context * 1e6:.0f} µs; an update "
        f"{update:.2f} s.\n\n"
        "| k | seconds a step | steps a second, of k = 0 | seconds, by the model | of k = 0, by the model | engine "
        "waits | mean age | largest age |\n|---|---|---|---|---|---|---|---|\n"
    )
    return write_page(PAGE, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
