"""What benchmarks/real_models.py measures of pretrained models besides what a training changes: the log-probs of
engines beside the trainer's, rewards computed again from the text, and the SFT and GRPO steps beside TRL's."""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pages import Row, kept

Interval = tuple[float, float, float]  # mean, or median; lower and upper end
PROMPTS, LENGTH = 160, 128  # 20,480 sampled tokens
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "largest": 1.0}
ROUNDS, WIDTH, STEPS, WARM = 3, 1024, 2, 2
TRL = (  # the four fastest settings of the grid of benchmarks/train_step.py in fp32, see its page
    "TRL, a document a pass, heap kept",
    "TRL, a document a pass, compiled",
    "TRL, a document a pass, eager attention, heap kept",
    "TRL, packed, 1 row a pass, heap kept",
)
GRPO = {  # settings of TRL's generation and update, 16 responses a step; see the page of benchmarks/grpo_step.py
    "TRL, 16 responses a pass, heap kept": {"pass": 16},
    "TRL, 4 responses a pass, heap kept": {"pass": 4},
    "TRL, 4 responses a pass, static cache, heap kept": {"pass": 4, "cache": "static"},
    "TRL, 4 responses a pass, continuous batching of 16, heap kept": {
        "pass": 4,
        "continuous": {"max_requests_per_batch": 16, "page_size": 32, "num_blocks": 512},
    },
}


def exactly(value: float) -> Interval:
    """Return a value that has no interval."""
    return value, value, value


# --- log-probs ----------------------------------------------------------------------------------------------------


def logprobs(model: Path, engine: str, precision: str) -> dict[str, Interval]:
    """Return how far the engine's log-probs of 20,480 sampled tokens are from the trainer's."""
    from ptf.compute.world import World, joined
    from ptf.config.logprob_limits import LOGPROB_LIMITS
    from ptf.config.sections.model import ModelConfig
    from ptf.data.document import Document
    from ptf.data.tokenizer import Tokenizer
    from ptf.model.sampling import NO_LOGITS_PROCESSING
    from ptf.rl.forward_passes import sample_logprobs
    from ptf.train.trainer import load_model

    tokenizer = Tokenizer.load(str(model))
    asked = [f"Tell me about the number {i} in a few sentences." for i in range(PROMPTS)]
    contexts = [
        np.array(tokenizer.render([{"role": "user", "content": text}], generation_prompt=True), np.int32)
        for text in asked
    ]
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # vLLM's process group is one a process
        made = apart.submit(sampled, model, engine, precision, contexts).result()
    samples = [
        Document(
            np.concatenate([g.context, g.sampled_ids]),
            (np.arange(len(g.context) + len(g.sampled_ids)) >= len(g.context)).astype(np.float32),
        )
        for g in made
    ]
    with joined("cpu", 600, threads=1) as world:
        assert isinstance(world, World)
        spec = ModelConfig(path=str(model))
        policy = load_model(model, world, spec, seed=0, precision=precision, frozen=True)
        values = sample_logprobs(
            policy, samples, world, seq_len=1024, micro_batch_sequences=1, processing=NO_LOGITS_PROCESSING
        )
    apart = np.concatenate(
        [np.abs(v[len(g.context) :] - g.logprobs) for v, g in zip(values, made, strict=True)], dtype=np.float64
    )
    limits = LOGPROB_LIMITS[precision]
    found = {"tokens": float(len(apart)), "mean": float(apart.mean())}
    found |= {name: float(np.quantile(apart, q)) for name, q in QUANTILES.items()}
    found |= {"share beyond the guard's bound": float((apart > limits.threshold).mean())}
    return {name: exactly(value) for name, value in found.items()}


def sampled(model: Path, engine: str, precision: str, contexts: Sequence[np.ndarray]) -> list[Any]:
    """Return the engine's responses to contexts, at temperature 1."""
    from ptf.rl.engines.protocol import Request, Sampling, generate_all

    asked = [Request(context, Sampling(LENGTH, 1.0, ()), seed=i) for i, context in enumerate(contexts)]
    return generate_all(engine_of(model, engine, precision), asked, 3600)


def engine_of(model: Path, engine: str, precision: str) -> Any:
    """Return an engine with the model's weights."""
    import torch

    if engine == "native":
        from ptf.rl.engines.native import NativeEngine

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        return NativeEngine(str(model), device=torch.device("cpu"), dtype=dtype, version=0)
    from ptf.rl.engines.vllm_engine import VLLMEngine, engine_env

    os.environ.update(engine_env(Path(tempfile.mkdtemp())))
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return VLLMEngine(str(model), seed=0, dtype=dtype, max_model_len=1024)


# --- rewards ------------------------------------------------------------------------------------------------------


def rewarded(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return the share of held-out tasks that are solved before and after, and how many rewards of the training and
    the evaluations differ from those that the stored texts get again."""
    from benchmarks.gsm8k_steps import wilson

    found = {}
    for name, file in (("before", "start/test"), ("after", "test")):
        given = kept(run / "responses" / f"{file}.jsonl")
        assert len(given) == len(kept(prepared / "test.jsonl"))
        rewards = [row["reward"] for row in given]
        assert None not in rewards, "a response has no result"
        share = sum(reward == 1 for reward in rewards) / len(rewards)
        found[f"rate {name}"] = (share, *wilson(share, len(rewards)))
        found[f"mean reward {name}"] = exactly(float(np.mean(rewards)))
    trained = kept(run / "samples.jsonl")
    again = [recomputed(row) for row in trained]
    found["rewards in training"] = exactly(float(len(trained)))
    found["of them computed again otherwise"] = exactly(
        float(sum(row["reward"] != value for row, value in zip(trained, again, strict=True)))
    )
    found["mean reward in training"] = exactly(float(np.mean([row["reward"] for row in trained])))
    return found


def recomputed(row: Row) -> float:
    """Return the reward of a stored response: of the code by its tests, of an agent by the turns' text."""
    from coder_rows import reward_of  # pyright: ignore[reportMissingImports]

    from ptf.rl.event_loop import run_coroutine
    from ptf.rl.rewards import code

    if "tests" in row["row"]:
        return run_coroutine(code(row["row"], row["response"]))
    text = "".join(token for token, *_ in row["tokens"])
    return reward_of(row["row"], text.split("<|im_end|>")[: row["turns"]])


# --- beside TRL ---------------------------------------------------------------------------------------------------


def beside_trl(model: Path) -> dict[str, Interval]:
    """Return tokens per CPU-second of ptf's SFT step, of its compiled one and of TRL's at four settings, fp32, one
    sequence of 1,024 tokens a step; medians and ranges of three interleaved rounds."""
    from train_grid import CELLS, LR
    from train_grid import TRL as PEER
    from train_step import assert_same, documents, rate, round_of

    config = json.loads((model / "config.json").read_text())
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "documents.npz"
        documents(place, config["vocab_size"], 1, STEPS + WARM, WIDTH)
        given = {"model": str(model), "documents": str(place), "width": WIDTH, "rows": 1, "dtype": "fp32"}
        given |= {"written": STEPS + WARM, "warmup": WARM, "steps": STEPS, "lr": LR}
        first: Row = {}
        for _ in range(ROUNDS):
            for system in ("ptf", "ptf, train.compile: true", *TRL):
                cell = CELLS[system]
                made = round_of(system, given | cell, peer=str(cell.get("script", PEER)))
                assert "refused" not in made, made
                first = first or made
                assert_same(made, first, "fp32")
                rates.setdefault(system, []).append(rate(made))
    found = {system: (median(each), min(each), max(each)) for system, each in rates.items()}
    best = max(TRL, key=lambda system: found[system][0])
    ratios = [ours / theirs for ours, theirs in zip(rates["ptf"], rates[best], strict=True)]
    assert all(map(math.isfinite, ratios))
    return found | {f"ptf, of {best}": (median(ratios), min(ratios), max(ratios))}


def grpo_beside_trl(model: Path) -> dict[str, Interval]:
    """Return CPU-seconds of ptf's GRPO step and of TRL's at four settings, fp32: 4 prompts of 64 tokens, 4 responses of
    128 tokens to each. Of TRL's fastest setting and of ptf, medians and ranges of three interleaved rounds.

    Prompts and responses are random ids of the model's vocabulary, as in benchmarks/grpo_step.py.
    """
    from grpo_step import LR, TOKENS, texts, tokenizer
    from train_step import round_of

    responses, group, steps = 16, 4, 2  # the first step warms up
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in ("config.json", "model.safetensors"):
            (Path(place) / name).symlink_to(model / name)
        tokenizer(place, json.loads((model / "config.json").read_text())["vocab_size"])
        given = {"model": place, "texts": texts(steps + 1)[: responses // group * (steps + 1)], "case": "equal"}
        given |= {"lengths": [[TOKENS] * responses] * steps, "turns": None, "observations": [], "lr": LR}
        given |= {"responses": responses, "group": group, "dtype": "fp32", "steps": 1, "warmup": steps - 1}
        given["written"] = steps
        given |= {"weights": "fp32", "attention": "sdpa", "cache": None, "continuous": None}

        def measure(system: str, number: int) -> None:
            one = given | {"seed": number} | GRPO.get(system, {})
            made = round_of(system, one, "benchmarks/grpo_step.py", "benchmarks/peers/trl_grpo.py")
            assert "refused" not in made, made
            assert made["tokens"] == [TOKENS * responses], made
            spent.setdefault(system, []).extend(made["cpu_s"])

        for system in ("ptf", *GRPO):
            measure(system, 0)
        best = min(GRPO, key=lambda system: spent[system][0])
        for number in range(1, ROUNDS):
            measure("ptf", number)
            measure(best, number)
    found = {system: (median(each), min(each), max(each)) for system, each in spent.items()}
    ratios = [theirs / ours for ours, theirs in zip(spent["ptf"], spent[best], strict=True)]
    return found | {f"{best}, times ptf": (median(ratios), min(ratios), max(ratios))}
