"""Does it learn what it should, on every seed, and does it not where it must not? One small model (3 layers of 64),
sequences of five digits, 15 minutes a seed on one core. Keeps what each recipe found with each seed in
results/learning.jsonl, with the settings of its runs, and writes results/learning.md from it; exits 1 where a bar is
missed or a seed is not there. What stands there with the present settings is not learned again.

    python benchmarks/learning.py [--seeds 0 1 …] [--minutes 60]

After `--minutes` no further run is begun; the next call goes on from the runs that are done (runs/learning).

    base  half of the answers reverse the digits, half repeat them: SFT, from random weights
    RM    pairs of a right reversal and one with a wrong digit; held-out pair accuracy. Control: pairs the wrong way
          round
    DPO   from the base, reversing preferred to repeating; probabilities of both on held-out prompts. Control: pairs
          the wrong way round
    KD    another model from random weights, taught by the base; KL(teacher ‖ student) on held-out prompts. Control: a
          teacher whose output rows are shuffled, so that what it says has nothing to do with what it read
"""

import contextlib
import json
import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.commands import options
from benchmarks.flow_runs import ROOT, results_page
from benchmarks.pages import Row, here, keep, kept, table, write_page
from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import Job, fingerprint, loads
from ptf.config.sections.model import ModelConfig
from ptf.data.encode import encode_document
from ptf.data.packing import pack_all
from ptf.data.tokenizer import Tokenizer
from ptf.evaluate.measurement import measure_run
from ptf.recipes.documents import sums
from ptf.recipes.dpo.recipe import DPO
from ptf.run import run
from ptf.tasks.tiny import write_model
from ptf.train.batch_sharding import deal
from ptf.train.trainer import load_model
from tests.recipes.of_keys import of_keys

RESULTS = results_page("learning.md")
KEPT = RESULTS.with_suffix(".jsonl")
SEEDS = range(10)
DIGITS, TRAIN, HELD_OUT, WIDTH = 5, 30_000, 300, 128
STEPS = {"base": 1200, "RM": 1300, "DPO": 800, "KD": 600}
BETA = 2.0  # of DPO; at 1.0 a third answer can take what both lose
PARTS = ("RM", "DPO", "KD")  # what is learned by itself; DPO and KD begin at the base


def settings_of(part: str) -> dict[str, Any]:
    """The settings of the runs that a part's numbers depend on."""
    steps = [STEPS[part]] if part == "RM" else [STEPS["base"], STEPS[part]]
    return {"steps": steps} | ({"beta": BETA} if part == "DPO" else {})


@dataclass(frozen=True)
class Bar:
    """What a number must be."""

    says: str
    met: Callable[[float, Mapping[str, float]], bool]  # the number, and all that the seed found


BARS = {
    "RM: held-out pair accuracy": Bar("≥ 0.97", lambda x, _: x >= 0.97),
    "RM, pairs the wrong way round": Bar("≤ 0.03", lambda x, _: x <= 0.03),
    "DPO: first loss": Bar("ln 2 to 1e-6", lambda x, _: abs(x - math.log(2)) <= 1e-6),
    "DPO: p(repeated), before": Bar("> 0.05", lambda x, _: x > 0.05),
    "DPO: p(repeated), after": Bar("≤ 0.01", lambda x, _: x <= 0.01),
    "DPO: p(reversed), before": Bar("", lambda x, _: True),
    "DPO: p(reversed), after": Bar(
        "twice as much, or ≥ 0.9", lambda x, found: x >= min(0.9, 2 * found["DPO: p(reversed), before"])
    ),
    "DPO, pairs the wrong way round: p(reversed), after": Bar("≤ 0.01", lambda x, _: x <= 0.01),
    "KD: KL to the teacher, before": Bar("> 0.5", lambda x, _: x > 0.5),
    "KD: KL to the teacher, after": Bar("< 0.05", lambda x, _: x < 0.05),
    "KD, teacher shuffled: KL to the true one, after": Bar("> 0.5", lambda x, _: x > 0.5),
}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Later(Exception):
    """There is no time for another run."""


class Seed:
    """Everything that is learned with one seed, in a directory of its own."""

    def __init__(self, directory: Path, seed: int, until: float) -> None:
        self.place, self.seed, self.until = directory, seed, until
        rng = np.random.default_rng(seed)
        every = [f"{n:0{DIGITS}}" for n in rng.permutation(10**DIGITS).tolist()]
        self.prompts = [p for p in every if p != p[::-1]][: TRAIN + HELD_OUT]  # of the others the two answers are one
        self.flips = rng.integers(0, 2, len(self.prompts))
        self.wrong = [self._corrupted(p[::-1], rng) for p in self.prompts]
        write_model(directory / "model", "0123456789", dim=64, layers=3)
        config = json.loads((directory / "model" / "config.json").read_text())
        (directory / "model" / "config.json").write_text(
            json.dumps(config | {"tie_word_embeddings": False, "initializer_range": 0.05})
        )

    @staticmethod
    def _corrupted(answer: str, rng: np.random.Generator) -> str:
        at = int(rng.integers(len(answer)))
        return answer[:at] + str((int(answer[at]) + int(rng.integers(1, 10))) % 10) + answer[at + 1 :]

    def files(self, name: str, row: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
        made = [row(i) for i in range(len(self.prompts))]
        train = write_rows(self.place / f"{name}.jsonl", made[:TRAIN])
        held_out = write_rows(self.place / f"{name}_held_out.jsonl", made[TRAIN:])
        return {"sources": {name: {"path": train}}, "validation": {"held_out": {"path": held_out}}, "seq_len": WIDTH}

    def job(
        self,
        recipe: str,
        data: Mapping[str, Any],
        steps: int,
        lr: float,
        start: Path | None = None,
        rows: int = 8,
        **sections: Any,
    ) -> Job:
        model = {"path": str(self.place / "model"), "init": "random"} if start is None else {"path": str(start)}
        train = {
            "steps": steps,
            "lr": lr,
            "global_batch_sequences": rows,
            "warmup_steps": 20,
            "schedule": "linear",
            "precision": "fp32",
            "validate_every": steps,
        }
        raw = {"recipe": recipe, "output": str(self.place / "runs"), "seed": self.seed, "model": model}
        raw |= {"data": dict(data), "train": train, "track": {"tensorboard": False, "print_every": 1000}}
        raw |= {"compute": {"launcher": "local", "device": "cpu", "threads": 1}}
        return loads(yaml.safe_dump(raw | sections))

    def learn(self, job: Job, name: str) -> Path:
        name = f"{name}-{fingerprint(job)[:8]}"  # a run with other settings is another run
        made = self.place / "runs" / name
        if (made / "model" / "model.safetensors").exists():
            return made
        if time.monotonic() > self.until:
            raise Later
        with contextlib.redirect_stdout(sys.stderr):
            return run(job, name)

    def part(self, name: str) -> dict[str, float]:
        """What one recipe learns."""
        if name == "RM":
            return self.reward_models()
        chats = self.files("answers", self.completion)
        base = self.learn(self.job("sft", chats, STEPS["base"], 2e-3), "base") / "model"
        return self.preferences(base) if name == "DPO" else self.taught(base, chats)

    def completion(self, i: int) -> dict[str, str]:
        return {"prompt": self.prompts[i], "completion": self.prompts[i][:: 1 if self.flips[i] else -1]}

    def pairs(self, reversed_: str, other: str, others: Sequence[str]) -> Callable[[int], Mapping[str, str]]:
        """Pairs of a reversal and another answer, under these keys."""
        return lambda i: {"prompt": self.prompts[i], reversed_: self.prompts[i][::-1], other: others[i]}

    def reward_models(self) -> dict[str, float]:
        found = {}
        for name, keys in (
            ("RM: held-out pair accuracy", ("chosen", "rejected")),
            ("RM, pairs the wrong way round", ("rejected", "chosen")),
        ):
            data = self.files("-".join(keys), self.pairs(*keys, self.wrong))
            data["validation"] = self.files("right", self.pairs("chosen", "rejected", self.wrong))["validation"]
            made = self.learn(self.job("rm", data, STEPS["RM"], 3e-3, rows=16), f"rm-{keys[0]}")
            found[name] = read_metrics(made / "metrics.jsonl")[-1]["accuracy/held_out"]
        return found

    def preferences(self, base: Path) -> dict[str, float]:
        reversed_, repeated = self.probability(base, -1), self.probability(base, 1)
        found = {}
        for keys in (("chosen", "rejected"), ("rejected", "chosen")):
            data = self.files("-".join(("reverse", *keys)), self.pairs(*keys, self.prompts))
            job = self.job("dpo", data, STEPS["DPO"], 3e-5, base, rows=16, algo={"beta": BETA})
            made = self.learn(job, f"dpo-{keys[0]}")
            after = self.probability(made / "model", -1), self.probability(made / "model", 1)
            if keys[0] == "chosen":
                found |= {"DPO: p(repeated), before": repeated, "DPO: p(repeated), after": after[1]}
                found |= {"DPO: p(reversed), before": reversed_, "DPO: p(reversed), after": after[0]}
                found["DPO: first loss"] = read_metrics(made / "metrics.jsonl")[0]["loss"]
            else:
                found["DPO, pairs the wrong way round: p(reversed), after"] = after[0]
        return found

    def probability(self, model: Path, step: int) -> float:
        """Mean over held-out prompts of how likely their answer is: what a sampled one is that often."""
        tokenizer = Tokenizer.load(str(model))
        rows = [{"prompt": p, "completion": p[::step]} for p in self.prompts[TRAIN:]]
        decoder = load_model(model, World(), ModelConfig(path=str(model)), seed=0, precision="fp32")
        units = [unit for row in rows for unit in encode_document(row, tokenizer, "held_out")]
        with torch.no_grad():
            found = [
                sums(of_keys(DPO).logprobs(decoder, batch), batch)
                for batch in deal(pack_all(units, WIDTH), World(), 8, WIDTH)
            ]
        return float(torch.cat(found).exp().mean())

    def taught(self, base: Path, chats: Mapping[str, Any]) -> dict[str, float]:
        shuffled = self.place / "shuffled"
        shutil.copytree(base, shuffled, dirs_exist_ok=True)
        (shuffled / "manifest.json").unlink(missing_ok=True)  # its digests are those of the base
        tensors = load_file(shuffled / "model.safetensors")
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(self.seed))]
        save_file(tensors, shuffled / "model.safetensors", metadata={"format": "pt"})
        found: dict[str, float] = {}

        def job_of(teacher: Path) -> Job:
            made = self.job("kd", chats, STEPS["KD"], 2e-3, algo={"teachers": {"base": {"path": str(teacher)}}})
            return made.model_copy(update={"seed": self.seed + 100})  # or the student would begin as the teacher did

        for teacher in (base, shuffled):
            made = self.learn(job_of(teacher), f"kd-{teacher.name}")
            metrics = measure_run(job_of(base), made)
            if teacher == base:
                found = {
                    "KD: KL to the teacher, before": metrics["starting_model/kl/held_out"],
                    "KD: KL to the teacher, after": metrics["kl/held_out"],
                }
            else:
                found["KD, teacher shuffled: KL to the true one, after"] = metrics["kl/held_out"]
        return found


def valid() -> list[Row]:
    """Of each seed and part, what was found last with the present settings, on which machine, when, by which commit."""
    newest = {(row["seed"], row["part"]): row for row in kept(KEPT) if settings_of(row["part"]).items() <= row.items()}
    return [newest[key] for key in sorted(newest)]


def main() -> int:
    asked = options(__doc__, seeds=list(SEEDS), minutes=math.inf)
    torch.set_num_threads(1)
    until, of = time.monotonic() + 60 * asked.minutes, here()
    done = {(row["seed"], row["part"]) for row in valid()}
    for seed in asked.seeds:
        place = ROOT / "runs" / "learning" / f"seed-{seed}"
        for part in (part for part in PARTS if (seed, part) not in done):
            place.mkdir(parents=True, exist_ok=True)
            try:
                found = Seed(place, seed, until).part(part)
            except Later:
                return write()
            row = {"seed": seed, "part": part, **settings_of(part), "found": found, **of}
            keep(KEPT, row)
            print(json.dumps(row), flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return write()


def write() -> int:
    """The page, of all that is kept; returns 1 if a bar was missed. What is not there misses its own."""
    rows = valid()
    found: dict[int, dict[str, float]] = {seed: {} for seed in SEEDS}
    for row in rows:
        found[row["seed"]] |= row["found"]
    there = {(row["part"], row["seed"]) for row in rows}
    missing = [f"{part} of seed {seed}" for seed in SEEDS for part in PARTS if (part, seed) not in there]
    lines, missed = [], list(missing)
    for name, bar in BARS.items():
        met = [bar.met(metrics[name], metrics) for metrics in found.values() if name in metrics]
        missed += [name] * (not all(met))
        digits = 7 if "loss" in name else 4
        cells = [f"{metrics[name]:.{digits}f}" if name in metrics else "not run" for metrics in found.values()]
        lines.append([name, bar.says, *cells, f"{sum(met)} of {len(met)}"])
    about = (
        "# Learning checks\n\n"
        "Command: `python benchmarks/learning.py` (`make learning-spmd`)  \nHardware, date and commit: by seed, "
        "below; one thread, no GPU\n\n"
        + (f"**Not learned yet: {', '.join(missing)}**, for which there was no time.\n\n" if missing else "")
        + "One Qwen3 shape of 3 layers of 64, untied, and sequences of five digits. `base`: "
        "SFT on answers of which half reverse the prompt,\n"
        f"half repeat it. {TRAIN:,} prompts to train on, {HELD_OUT} held out, on which everything here is measured; "
        "p is the mean probability of\n"
        "an answer, which is how often it would be sampled. Rows named `the wrong way round` and `shuffled` are "
        "negative controls: the same\n"
        "runs with labels, or a teacher, from which the task cannot be learned. Steps: "
        + ", ".join(f"{part} {steps:,}" for part, steps in STEPS.items())
        + f"; DPO's beta is {BETA}.\n\n"
    )
    made = table(["check", "bar", *(f"seed {seed}" for seed in found), ""], lines)
    return write_page(RESULTS, about, [made, "", origins(rows)], missed)


def origins(rows: Iterable[Mapping[str, Any]]) -> str:
    """Which seeds came from which commit, machine and day, a line each."""
    seeds = defaultdict(set)
    for row in rows:
        seeds[row["date"], row["commit"], row["hardware"]].add(row["seed"])

    def said(of):
        return ", ".join(map(str, sorted(of)))

    return "\n".join(
        f"* {date}, commit {of}, {machine}: seeds {said(each)}" for (date, of, machine), each in sorted(seeds.items())
    )


if __name__ == "__main__":
    sys.exit(main())
