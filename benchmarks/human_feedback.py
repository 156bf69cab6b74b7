"""Reward models and DPO on what people said of answers. Needs the data (PTF_DATA). A small model is first trained from
scratch on chats, with the minimind tokenizer; then

    ratings      a reward model of 3,667 ratings of a ticket agent's turns (Taskmaster-3; 16 % are good), split by
                 dialogue: area under the ROC curve on held-out dialogues, beside what turns' lengths and a bag of
                 words give
    preferences  a reward model and DPO of 612 pairs of answers (OpenAssistant), split by prompt: held-out pair
                 accuracy, beside taking the longer one

    python benchmarks/human_feedback.py [--seeds 0 1 2] [--on dev]      # writes benchmarks/results/human_feedback.md

`--on dev`, or a fold from 0 to 3, measures on a part of the training data instead, and writes nothing: learning rates
and epochs were chosen there, those of the ratings by the mean over the four folds.
"""

import contextlib
import gzip
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from commands import ROOT, options
from flow_runs import results_page
from gsm8k_steps import wilson
from pages import head, table, write_page
from published_shapes import qwen3
from transformers import AutoModelForSequenceClassification

from ptf.config import Job, fingerprint, loads
from ptf.data.document import PackUnit, length
from ptf.data.encode import encode_preference, encode_scored
from ptf.data.tokenizer import Tokenizer
from ptf.evaluate.measurement import auc, measure_run
from ptf.run import run
from tests.conftest import SHARED as DATA
from tests.tiny import write_jsonl

OUTPUT = ROOT / "runs" / "human_feedback"
WIDTH = 4096
FIRST_STEPS = 1500
RATINGS = "prefs/taskmaster3_movie_tickets_reward.jsonl.gz"
MODEL = qwen3(128, 4, 4, 384, tied=True) | {
    "torch_dtype": "float32",
    "vocab_size": 6400,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": WIDTH,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
}
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    with gzip.open(DATA / name, "rt") as lines:
        return [json.loads(line) for line in lines]


def opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the user says first: dialogues that begin alike stay together."""
    return next(m["content"] for m in messages if m["role"] == "user")


def part(text: str) -> str:
    """Of a dialogue: a fifth is for test, a fifth of the rest for dev."""
    return "test" if drawn(text) % 5 == 0 else "dev" if drawn(text) // 5 % 5 == 0 else "train"


def drawn(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def split(rows: Sequence[Row], on: str, encode: Callable[..., list[PackUnit]]) -> tuple[list[Row], list[Row]]:
    """To train on and to measure on, of the rows that fit. Test rows are in neither where it is not measured on
    them."""
    tokenizer = Tokenizer.load(str(DATA / "tokenizers" / "minimind"))
    rows = [row for row in rows if length(encode(row, tokenizer)[0]) <= WIDTH]
    begun = [opening(row["prompt"]) for row in rows]
    held_out = [
        part(text) == on if on in ("dev", "test") else part(text) != "test" and drawn(text) // 5 % 4 == int(on)
        for text in begun
    ]
    train = [row for row, text, out in zip(rows, begun, held_out, strict=True) if not out and part(text) != "test"]
    return train, [row for row, out in zip(rows, held_out, strict=True) if out]


def written(name: str, rows: Sequence[Row]) -> dict[str, str]:
    return {"path": str(write_jsonl(OUTPUT / f"{name}.jsonl", list(rows)))}


def job(
    recipe: str,
    seed: int,
    model: Mapping[str, Any],
    sources: Mapping[str, Any],
    validation: Mapping[str, Any],
    train: Mapping[str, Any],
    **more: Any,
) -> Job:
    raw = {
        "recipe": recipe,
        "output": str(OUTPUT / "runs"),
        "seed": seed,
        "model": dict(model),
        "data": {"sources": dict(sources), "validation": dict(validation), "seq_len": WIDTH, **more.pop("data", {})},
        "train": {
            "global_batch_sequences": 2,
            "micro_batch_sequences": 2,
            "schedule": "linear",
            "precision": "fp32",
            **train,
        },
        "compute": {"launcher": "local", "device": "cpu", "threads": 1},
        "track": {"tensorboard": False},
        "checkpoint": {"every": 10_000},
        **more,
    }
    return loads(yaml.safe_dump(raw))


def trained(one: Job, name: str) -> Path:
    """Its run; what is there already is taken."""
    name = f"{name}-{fingerprint(one)}"
    made = OUTPUT / "runs" / name
    if not (made / "model" / "model.safetensors").exists():
        with contextlib.redirect_stdout(sys.stderr):
            run(one, name)
    return made


def chatty() -> Path:
    """The model that everything starts from: it has read chats, but none that begins as one does that is held out for
    the test; no rating and no preference."""
    place = OUTPUT / f"model{WIDTH}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODEL))
    assistants = [row for row in read("chat/oasst_en100_paths.jsonl.gz") if part(opening(row["messages"])) == "train"]
    rated = [row for row in read(RATINGS) if part(opening(row["prompt"])) != "test"]
    dialogues = {
        "tasks": (0.5, [row["messages"] for row in read("chat/sgd_test_dialogues.jsonl.gz")]),
        "agents": (0.12, [row["messages"] for row in read("chat/tau_airline_gpt4o.jsonl.gz")]),
        "assistants": (0.08, [row["messages"] for row in assistants]),
        "movies": (0.3, [asked_first([*row["prompt"], row["completion"]]) for row in longest(rated)]),
    }
    chats = {
        name: written(name, [{"messages": one} for one in each]) | {"sampling_weight": weight}
        for name, (weight, each) in dialogues.items()
    }
    model = {"path": str(place), "init": "random", "tokenizer": str(DATA / "tokenizers" / "minimind")}
    train, data = {"steps": FIRST_STEPS, "lr": 2e-3, "warmup_steps": 20}, {"train_on": "all", "too_long": "truncate"}
    return trained(job("sft", 0, model, chats, {}, train, data=data), "chatty") / "model"


def longest(rows: Sequence[Row]) -> list[Row]:
    """Of the rows of which each is a dialogue up to one of its turns, those that no other goes on from."""
    begun = [json.dumps(row["prompt"])[:-1] for row in rows]
    return [
        row
        for row, one in zip(rows, begun, strict=True)
        if not any(other != one and other.startswith(one) for other in begun)
    ]


def asked_first(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without what the assistant says before it is asked anything."""
    return list(messages[next(i for i, m in enumerate(messages) if m["role"] != "assistant") :])


def conversations(rows: Sequence[Row]) -> list[Row]:
    """Rated turns of a dialogue as one row: most rows go on from another. A turn that was rated otherwise in another
    row, or another turn in its place, begins a row of its own."""
    made: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["prompt"])):
        rated = [nameless(message) for message in (*row["prompt"], row["completion"])]
        last = len(rated) - 1
        whole = next(
            (one for one in made if "reward" not in one[last] and list(map(unrated, one[: last + 1])) == rated), None
        )
        if whole is None:
            made.append(whole := rated)
        whole[last] = {**whole[last], "reward": row["reward"]}
    return [{"messages": messages} for messages in made]


def nameless(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the numbers of its calls, which differ from row to row, and which no template shows."""
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls") or ()]
    return {key: value for key, value in message.items() if key not in ("tool_call_id", "tool_calls")} | (
        {"tool_calls": calls} if calls else {}
    )


def unrated(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reward"}


def scored(model: Path, rows: Sequence[Row]) -> np.ndarray:
    """What the exported reward model says of each, in transformers."""
    tokenizer, made = (
        Tokenizer.load(str(model)),
        AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32),
    )
    with torch.no_grad():
        return np.array(
            [
                float(made(torch.tensor(encode_scored(row, tokenizer)[0][0].tokens[None].astype(np.int64))).logits)
                for row in rows
            ]
        )


def ratings(seed: int, base: Path, on: str, sums: np.ndarray | None) -> tuple[np.ndarray, dict[str, float]]:
    """The sum of all runs' scores so far, and what is found."""
    every = read(RATINGS)
    train, held_out = split(every, on, encode_scored)
    sources = {"ratings": written(f"ratings-{on}", conversations(train)) | {"kind": "scored"}}
    validation = {on: written(f"ratings-held-out-{on}", conversations(held_out)) | {"kind": "scored"}}
    settings = {"epochs": 3, "lr": 1e-3, "warmup_steps": 20, "weight_decay": 0.1}
    one = job("rm", seed, {"path": str(base)}, sources, validation, settings, algo={"loss_type": "binary"})
    made = trained(one, f"ratings-{on}-{seed}")
    found = measure_run(one, made)
    scores = scored(made / "model", held_out)
    truth = np.array([row["reward"] > 0.5 for row in held_out])
    words = bag_of_words(train, held_out)
    assert abs(auc(scores, truth) - found[f"auc/{on}"]) < 1e-3, (
        "transformers scores the exported model as the evaluation did"
    )
    summed = scores if sums is None else sums + scores
    return summed, {
        "AUC": found[f"auc/{on}"],
        "AUC of the mean of this run's scores and those before it": auc(summed, truth),
        "calibration error": found[f"calibration_error/{on}"],
        "accuracy": found[f"accuracy/{on}"],
        "majority, accuracy": max(truth.mean(), 1 - truth.mean()),
        "majority, AUC": 0.5,
        "length of the turn, AUC": longer(found[f"length_baseline_auc/{on}"]),
        "length of what came before, AUC": longer(
            auc(np.array([len(str(row["prompt"])) for row in held_out], float), truth)
        ),
        "bag of words of the turn, AUC": auc(words[0], truth),
        "bag of words of all, AUC": auc(words[1], truth),
        "held out": len(held_out),
        "trained": len(train),
        "too long": len(every) - len(train) - len(held_out) if on == "test" else 0,
    }


def longer(found: float) -> float:
    """Whichever way round says more."""
    return max(found, 1 - found)


def said(message: Mapping[str, Any]) -> str:
    return " ".join(
        [message.get("content") or "", *(json.dumps(call["function"]) for call in message.get("tool_calls") or ())]
    )


def bag_of_words(train: Sequence[Row], held_out: Sequence[Row]) -> list[np.ndarray]:
    """Scores of the held-out rows by a logistic regression over the words that are there,
    of the turn alone and of the dialogue with it."""
    scores = []
    for text in (
        lambda row: said(row["completion"]),
        lambda row: " ".join(map(said, [*row["prompt"], row["completion"]])),
    ):
        words = [set(re.findall(r"\w+", text(row).lower())) for row in (*train, *held_out)]
        often = Counter(word for found in words[: len(train)] for word in found)
        index = {word: i for i, word in enumerate(word for word, n in often.items() if n >= 3)}
        there = torch.zeros(len(words), len(index))
        for row, found in enumerate(words):
            there[row, [index[word] for word in found if word in index]] = 1
        truth, x = torch.tensor([row["reward"] for row in train]), there[: len(train)]
        weight, bias = torch.zeros(len(index), requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=200)

        def closure(x=x, truth=truth, weight=weight, bias=bias, optimizer=optimizer) -> float:
            optimizer.zero_grad()
            loss = (
                torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, truth)
                + 1e-3 * weight.square().sum()
            )
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        scores.append((there[len(train) :] @ weight).detach().double().numpy())
    return scores


def preferences(seed: int, base: Path, on: str) -> dict[str, float]:
    rows = [
        {key: row[key] for key in ("prompt", "chosen", "rejected")} for row in read("prefs/oasst_en100_pairs.jsonl.gz")
    ]
    train, held_out = split(rows, on, encode_preference)
    sources, validation = {"pairs": written(f"pairs-{on}", train)}, {on: written(f"pairs-held-out-{on}", held_out)}
    found: dict[str, float] = {
        "held out": len(held_out),
        "trained": len(train),
        "too long": len(rows) - len(train) - len(held_out) if on == "test" else 0,
    }
    for name, recipe, settings, algo in (
        ("reward model", "rm", {"epochs": 2, "lr": 2e-4}, {}),
        ("DPO", "dpo", {"epochs": 2, "lr": 1e-4}, {"beta": 0.1}),
    ):
        one = job(recipe, seed, {"path": str(base)}, sources, validation, {**settings, "warmup_steps": 5}, algo=algo)
        measured = measure_run(one, trained(one, f"{recipe}-{on}-{seed}"))
        found |= {
            f"{name}, accuracy": measured[f"accuracy/{on}"],
            "the longer answer, accuracy": measured[f"length_baseline_accuracy/{on}"],
        }
    return found


def main() -> None:
    asked = options(__doc__, seeds=[0, 1, 2], on="test")
    began = time.perf_counter()
    there = any((OUTPUT / "runs").glob("chatty-*/model/model.safetensors"))
    base = chatty()
    found: dict[str, list[dict[str, float]]] = {}
    sums, found["ratings"] = None, []
    for seed in asked.seeds:
        sums, measured = ratings(seed, base, asked.on, sums)
        found["ratings"].append(measured)
        print(json.dumps({"ratings": measured}), flush=True)
    found["preferences"] = [preferences(seed, base, asked.on) for seed in asked.seeds]
    print(json.dumps({"preferences": found["preferences"]}), flush=True)
    if asked.on == "test":
        write(found, time.perf_counter() - began, there)


def write(found: Mapping[str, Sequence[Mapping[str, float]]], spent: float, there: bool) -> None:
    sections = []
    for name, seeds in found.items():
        counts = (
            f"{int(seeds[0]['trained']):,} to train on, {int(seeds[0]['held out']):,} held out; "
            f"{int(seeds[0]['too long'])} are longer than {WIDTH:,} tokens."
        )
        lines = []
        for key in [key for key in seeds[0] if key not in ("trained", "held out", "too long")]:
            values = [seed[key] for seed in seeds]
            mean = sum(values) / len(values)
            low, high = wilson(mean, int(seeds[0]["held out"]))
            interval = f" [{low:.3f}, {high:.3f}]" if "accuracy" in key else ""
            lines.append([key, *(f"{value:.3f}" for value in values), f"{mean:.3f}{interval}"])
        made = table(["", *(f"run {i}" for i in range(len(seeds))), "mean"], lines)
        sections.append(f"## {name.capitalize()}\n\n{counts}\n\n{made}\n")
    hardware = f", no GPU; {spent / 60:.0f} minutes{' after the first training' * there}"
    about = head("Human feedback", hardware) + (
        "One small model (Qwen3 shape, 4 layers of 128, minimind tokenizer, 1.6 million parameters) read chats for "
        f"{FIRST_STEPS:,} steps from random weights:\n"
        "task dialogues, agent trajectories, assistants' conversations, "
        "and the ticket agent's dialogues without their ratings, of which none begins as a\n"
        "held-out one does. Then each column below is a training run of its own from there. "
        "What is held out is a fifth of the dialogues, by what the user\n"
        "says first. Most rows of the ratings go on from another; they are trained on as conversations with a "
        "`reward` at each rated turn. The learning rate\n"
        "(of 5e-4, 1e-3 and 2e-3) and the epochs of the ratings were chosen by four folds of the other dialogues "
        "(`--on 0` to `--on 3`; 2e-3 by two of\n"
        "them), and those of the preferences on a fifth of them (`--on dev`).\n"
        "Brackets: 95 % Wilson interval of the mean, as if held-out rows were independent.\n\n"
    )
    write_page(results_page("human_feedback.md"), about, sections)


if __name__ == "__main__":
    main()
