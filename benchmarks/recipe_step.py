"""The steps of DPO, reward models and distillation beside TRL's trainers, in interleaved rounds: real tokens per
CPU-second of one thread, on the same documents from the same weights, so that the losses of every step must be the
same too. Every step has the same documents, so that their loss falls, and losses are compared as shares of that fall:
where they agree, the updates do.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/recipe_step.py [--recipes dpo rm kd] [--dtypes fp32 bf16] [--rounds 3]

A pair is a prompt (log-normal lengths, median 90 tokens) with two responses (median 180), of at most 600 each; a step
has 8 pairs, of which distillation has the first response alone, with 16 documents a step. All train `small4`
(benchmarks/train_grid.py) by AdamW, one thread; DPO's reference and the teacher of distillation are models of their
own. ptf packs a step's documents into sequences of up to 2,048, a sequence a pass. TRL pads the documents of a pass to
the longest: passes of several sizes are tried in the first round, with gradient accumulation, and the fastest one runs
beside ptf in all others; TRL's processes keep what they free, as those of ptf do by themselves. Prints a JSON line a
round and writes results/dpo_step.md, rm_step.md and kd_step.md.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flow_runs import results_page
from pages import head, spread, table, write_page
from train_grid import HEADS, KEPT_HEAP, MODELS, OF_HEAP, WIDTH, rate
from train_step import asked_of, round_of, start

MODEL = "small4"
OURS, THEIRS = "benchmarks/recipe_step.py", "benchmarks/peers/trl_recipes.py"
LR, BETA = 2e-5, 0.1
# the most that a step of the two may differ by: its loss, as a share of what the loss falls by in a round, and its
# gradient's norm, as a share of itself. bf16 rounds to 0.4 %
SHARES_APART = {"fp32": (1e-4, 1e-4), "bf16": (4e-3, 4e-3)}


@dataclass(frozen=True)
class Compared:
    """A recipe, and what of TRL it is compared with."""

    title: str
    trainer: str
    responses: int  # to a prompt
    units: int  # pairs or documents of a step
    unit: str
    passes: tuple[int, ...]  # units in a pass of TRL's that are tried
    work: str  # of a step, for the page
    head: Literal["lm", "scalar"] = "lm"


RECIPES = {
    "dpo": Compared(
        "DPO",
        "DPOTrainer",
        2,
        8,
        "pair",
        (8, 4, 2, 1),
        "the policy's forward and backward pass, a reference's forward pass, AdamW",
    ),
    "rm": Compared(
        "reward-model",
        "RewardTrainer",
        2,
        8,
        "pair",
        (8, 4, 2, 1),
        "forward and backward pass of a model with a scalar head, Bradley–Terry, AdamW",
        "scalar",
    ),
    "kd": Compared(
        "distillation",
        "GKDTrainer (trl.experimental.gkd; `lmbda` 0, `beta` 0)",
        1,
        16,
        "document",
        (16, 8, 4, 2, 1),
        "a teacher's forward pass, the student's forward and backward pass, KL(teacher ‖ student) over the whole "
        "vocabulary at each token of the response, AdamW",
    ),
}


def documents(path: Path, vocab: int, count: int, responses: int, steps: int) -> None:
    """`lengths` [steps × count, 1 + responses] of prompts and responses; `tokens`, one after the other; every step has
    the same."""
    rng = np.random.default_rng(0)
    drawn = [np.clip(rng.lognormal(np.log(90), 0.7, count), 4, 600)]
    drawn += [np.clip(rng.lognormal(np.log(180), 0.74, count), 4, 600) for _ in range(responses)]
    lengths = np.stack(drawn, 1).astype(int)
    tokens = rng.integers(2, vocab, lengths.sum())
    np.savez(path, lengths=np.tile(lengths, (steps, 1)), tokens=np.tile(tokens, steps))


def units_of(path: str) -> list[Any]:
    """The documents of each prompt as a unit of packing."""
    from ptf.data.document import Document

    stored = np.load(path)
    cuts = np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"].reshape(-1))[:-1])
    width = stored["lengths"].shape[1]

    def sample(prompt, response):
        trained = np.arange(len(prompt) + len(response)) >= len(prompt)
        return Document(np.concatenate([prompt, response]), trained.astype(np.float32))

    return [
        tuple(sample(cuts[i], response) for response in cuts[i + 1 : i + width]) for i in range(0, len(cuts), width)
    ]


def recipe_of(name: str) -> Any:
    from ptf.recipes.dpo.config import DPOConfig
    from ptf.recipes.dpo.recipe import DPO
    from ptf.recipes.kd.config import KDConfig, TeacherConfig
    from ptf.recipes.kd.recipe import KD
    from ptf.recipes.rm.config import RMConfig
    from ptf.recipes.rm.recipe import RM

    return {
        "dpo": DPO(DPOConfig(beta=BETA)),
        "rm": RM(RMConfig()),
        "kd": KD(KDConfig(teachers={"teacher": TeacherConfig(path="unused")})),
    }[name]


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over the packed documents of each step, as a run does it."""
    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.document import length
    from ptf.data.packing import pack_all
    from ptf.train.trainer import Trainer, load_model

    units, total, count = units_of(given["documents"]), given["written"], given["units"]
    with joined("cpu", 600, threads=1) as world:
        train = TrainConfig(
            steps=total, lr=LR, schedule="constant", precision=given["dtype"], betas=(0.9, 0.999), weight_decay=0.0
        )

        def loaded(directory, head, frozen):
            spec = ModelConfig(path=directory)
            return load_model(
                Path(directory),
                world,
                spec,
                seed=0,
                precision=train.precision,
                head=head,
                frozen=frozen,
                fused=train.fused,
            )

        model = loaded(given["model"], RECIPES[given["recipe"]].head, False)
        recipe = recipe_of(given["recipe"])
        frozen = {name: loaded(given["frozen"], "lm", True) for name in recipe.frozen_models}
        trainer = Trainer(model, world, train, frozen)
        weight = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        cpu_s, tokens, losses, norms = [], [], [], []
        for step in range(total):
            sequences = pack_all(units[step * count : (step + 1) * count], WIDTH)
            # a run's sequences are full; those of a few documents alone are not
            micro = [Batch.of([sequence], sum(map(length, sequence))) for sequence in sequences]
            began = time.process_time()
            metrics = trainer.step(micro, recipe, step)
            if step >= given["warmup"]:
                cpu_s.append(time.process_time() - began)
                tokens.append(sum(sum(batch.lengths) for batch in micro))
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
    print(json.dumps({"cpu_s": cpu_s, "tokens": tokens, "losses": losses, "norms": norms, "weight": weight}))


def compared(name: str, dtype: str, asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The rounds of ptf and of each of TRL's settings; of all but the fastest of these, one.

    Raises AssertionError where two did not do the same.
    """
    about = RECIPES[name]
    systems = {"ptf": 0} | {f"TRL, {n} {about.unit}{'s' * (n > 1)} a pass{KEPT_HEAP}": n for n in about.passes}
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    written = asked.steps + asked.warmup
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "documents.npz"
        documents(path, MODELS[MODEL]["vocab_size"], about.units, about.responses, written)
        model = start(Path(directory), MODELS[MODEL], head=about.head)
        frozen = None
        if name == "dpo":
            frozen = model
        elif name == "kd":  # the teacher's weights are others: beside itself a student has nothing to learn
            frozen = start(Path(directory), MODELS[MODEL], seed=1)
        given = {
            "recipe": name,
            "model": model,
            "frozen": frozen,
            "documents": str(path),
            "dtype": dtype,
            "units": about.units,
            "written": written,
            "warmup": asked.warmup,
            "steps": asked.steps,
            "lr": LR,
            "beta": BETA,
            "width": WIDTH,
            "compile": False,
            "liger": False,
        }
        for number in range(asked.rounds):
            for system in ("ptf", fastest(found)) if number else systems:
                one = round_of(system, given | {"pass": systems[system]}, OURS, THEIRS)
                shown = {"recipe": name, "dtype": dtype, "system": system, "round": number}
                print(json.dumps({**shown, "rate": round(rate(one)), **one}), flush=True)
                assert_same(one, (found["ptf"] or [one])[0], dtype)
                found[system].append(one)
    return found


def fastest(found: dict[str, list[dict[str, Any]]]) -> str:
    """TRL's setting with the highest rate in its first round."""
    return max((system for system in found if system != "ptf"), key=lambda system: rate(found[system][0]))


def assert_same(one: dict[str, Any], first: dict[str, Any], dtype: str) -> None:
    """Raise AssertionError where a round did not do what ptf's first did."""
    assert math.isclose(one["weight"], first["weight"], rel_tol=1e-9), "all start from the same weights"
    assert one["tokens"] == first["tokens"], "all count the same tokens"
    assert all(map(math.isfinite, (*one["losses"], *one["norms"]))), "no loss or gradient is infinite or no number"
    loss, norm = SHARES_APART[dtype]
    assert losses_apart(one, first) <= loss, f"all have the same losses: {one['losses']} and {first['losses']}"
    assert norms_apart(one, first) <= norm, f"all have the same gradients: {one['norms']} and {first['norms']}"


def losses_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a step's loss, as a share of what the other's falls by in the round."""
    fall = other["losses"][0] - other["losses"][-1]
    assert fall > 0, f"a loss over the same documents falls: {other['losses']}"
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)) / fall


def norms_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of the norm of a step's gradient, as a share of it."""
    return max(abs(a / b - 1) for a, b in zip(one["norms"], other["norms"], strict=True))


def lines_of(dtype: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A row for each of TRL's settings, beside the rounds of ptf of the same minutes."""
    best, lines = fastest(found), []
    for system, rounds in list(found.items())[1:]:
        beside = found["ptf"][: len(rounds)]
        ratios = spread([rate(a) / rate(b) for a, b in zip(beside, rounds, strict=True)], ",.2f")
        names = (f"**{system}**", f"**{ratios}**") if system == best else (system, ratios)
        rates = [spread([rate(one) for one in of]) for of in (beside, rounds)]
        columns = [
            dtype,
            names[0],
            *rates,
            names[1],
            f"{found['ptf'][0]['losses'][0]:.6f} → {found['ptf'][0]['losses'][-1]:.6f}",
            *(f"{max(share(one, found['ptf'][0]) for one in rounds):.1e}" for share in (losses_apart, norms_apart)),
        ]
        lines.append(columns)
    return lines


NAMES = "dtype | beside | ptf, real tokens per CPU-second | TRL | ratio | loss | losses apart | norms apart"


def write(name: str, lines: Sequence[Sequence[str]], asked: argparse.Namespace) -> None:
    about, page = RECIPES[name], results_page(f"{name}_step.md")
    command = " ".join(["python benchmarks/recipe_step.py", *sys.argv[1:]])
    bounds = " and ".join(f"{loss:.2%} and {norm:.2%} in {d}" for d, (loss, norm) in SHARES_APART.items())
    frozen = {"dpo": "reference", "kd": "teacher"}.get(name)
    load = f", one thread, no GPU; load of the last 15 minutes {os.getloadavg()[2]:.1f}, of which 1 is the benchmark's"
    text = head(f"The {about.title} step beside TRL", load, command=f"`{command}` (`make peers bench-recipes`)") + (
        f"Interleaved rounds ({asked.rounds} of ptf and of TRL's fastest setting, which stands in bold; one of its "
        f"others), {asked.steps} timed steps a round after {asked.warmup} of warm-up;\n"
        f"{about.units} {about.unit}s, the same in every step and for all systems, so that the loss falls. "
        f"A step: {about.work}.\n"
        "Prompts: log-normal lengths, median 90; responses: median 180; at most 600 each. ptf: packed sequences of up "
        "to 2,048 tokens, a sequence a pass,\n"
        f"none filled up. TRL: {about.trainer}, versions in `benchmarks/requirements-peers.txt`; it pads the "
        f"{about.unit}s of a pass to the longest; what a pass does\nnot hold is accumulated. {OF_HEAP} "
        f"`{MODEL}`: Qwen3 shape, width 256, 4 layers, {HEADS}, vocabulary 4,096; bf16 is autocast over weights of "
        f"fp32 for both{f'; of its {frozen} ptf then holds weights of bf16' if frozen else ''}.\n"
        "All start from the same weights and count the same tokens. A step's loss may differ by a share of what the "
        "loss falls by in a round, and the norm of its gradient\nby a share of itself: "
        f"{bounds}; the largest shares are in the table, beside ptf's loss in the first and the last step. These\n"
        "ratios are a CPU's.\n\n"
    )
    write_page(page, text, [table(NAMES, lines)])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    asked = asked_of(__doc__, recipes=list(RECIPES))
    for name in asked.recipes:
        write(name, [line for dtype in asked.dtypes for line in lines_of(dtype, compared(name, dtype, asked))], asked)


if __name__ == "__main__":
    main()
