"""What ptf does to pretrained models: SFT, DPO, a reward model and GRPO of SmolLM2-135M-Instruct, with controls.
Needs the models (`make models`) and the data (PTF_DATA). Writes results/real_models.md, and real_models.jsonl as it
goes.

    python benchmarks/real_models.py [--only UNIT …] [--anew]

A unit is one training of a job of configs/smollm2/ with one seed, and what it changed on held-out rows. Two units run
at once, one thread each. A unit that the ledger has at this commit is not made again. Intervals are 95 % ones over
rows, or over trees of OpenAssistant where rows of a tree share their beginning.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "smollm2"
sys.path[:0] = [str(ROOT), str(CONFIGS)]

import numpy as np  # noqa: E402

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from benchmarks.pages import write_page  # noqa: E402

MODELS = Path(os.environ.get("PTF_MODELS") or ROOT / "data" / "models")
SMOLLM2 = MODELS / "smollm2-135m-instruct"
OUTPUT = ROOT / "runs" / "real_models"
RESULTS = results_page("real_models.md")
KEPT = RESULTS.with_suffix(".jsonl")
Row = dict[str, Any]
Interval = tuple[float, float, float]  # mean, lower and upper end


@dataclass(frozen=True)
class Unit:
    """One training: a config of configs/smollm2/, what is changed in it, and how its result is measured."""

    config: str
    measure: Callable[[Path, Path], dict[str, Interval]]  # (run, prepared data) → what changed
    seed: int = 0
    set: tuple[str, ...] = ()
    after: str = ""  # the unit whose published model it starts from


def units() -> dict[str, Unit]:
    """Return all units by name; those that start from another unit's model come after it."""
    seeds = range(3)
    made = {f"SFT, seed {seed}": Unit("sft", conversations, seed) for seed in seeds}
    made["SFT, LoRA"] = Unit("sft_lora", conversations)
    made["SFT, control: answers permuted"] = Unit("sft", conversations, set=("data.prepare.args.permute=true",))
    made |= {f"DPO, seed {seed}": Unit("dpo", pairs, seed) for seed in seeds}
    made |= {f"reward model, seed {seed}": Unit("rm", pairs, seed) for seed in seeds}
    made["SFT on the form of answers"] = Unit("sums_form", answers)
    made |= {f"GRPO, seed {seed}": Unit("grpo", answers, seed) for seed in seeds}
    control = ("data.prepare.args.shuffle_answers=true", "train.steps=10")
    made["GRPO, control: answers shuffled"] = Unit("grpo", answers, set=control)
    form = "SFT on the form of answers"
    made |= {f"GRPO from the form, seed {seed}": Unit("grpo_form", answers, seed, after=form) for seed in seeds}
    made["GRPO from the form, control: answers shuffled"] = Unit("grpo_form", answers, set=control, after=form)
    return made


# --- what a training changed --------------------------------------------------------------------------------------


def over_groups(differences: Sequence[float], groups: Sequence[Any]) -> Interval:
    """Return the mean of the differences and its 95 % interval, where those of one group are not independent."""
    from ptf.gate import quantile

    values, names = np.asarray(differences, float), np.asarray([str(g) for g in groups])
    mean = values.mean()
    sums = np.array([(values[names == name] - mean).sum() for name in np.unique(names)])
    n = len(sums)
    half = quantile(n - 1) * math.sqrt((sums**2).sum() * n / (n - 1)) / len(values)
    return float(mean), float(mean - half), float(mean + half)


def rows(place: Path) -> list[Row]:
    """Return the rows of a jsonl file."""
    return [json.loads(line) for line in place.read_text().splitlines()]


def last_turn_losses(model: Path, conversations: Sequence[Row]) -> np.ndarray:
    """Return the mean loss of the tokens of each conversation's last answer, [rows], in fp32."""
    from ptf.compute.world import World, joined
    from ptf.config.sections.model import ModelConfig
    from ptf.data.encode import encode_document
    from ptf.data.tokenizer import Tokenizer
    from ptf.model.sampling import NO_LOGITS_PROCESSING
    from ptf.rl.forward_passes import sample_logprobs
    from ptf.train.trainer import load_model

    tokenizer = Tokenizer.load(str(model))
    samples = [encode_document(row, tokenizer, train_on="last")[0][0] for row in conversations]
    with joined("cpu", 600, 1, 1, 1) as world:
        assert isinstance(world, World)
        made = load_model(model, world, ModelConfig(path=str(model)), seed=0, precision="fp32", frozen=True)[0]
        found = sample_logprobs(
            made, samples, world, seq_len=1024, micro_batch_sequences=1, processing=NO_LOGITS_PROCESSING
        )
    return np.array([-float(v.sum()) / float((s.loss_weights != 0).sum()) for v, s in zip(found, samples, strict=True)])


def conversations(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return what SFT changed of the held-out loss, and of the gap between another row's answer and the own one."""
    own, swapped = rows(prepared / "held_out.jsonl"), rows(prepared / "swapped.jsonl")
    trees = [row["tree_id"] for row in own]
    loss, gap = {}, {}
    for name, model in (("before", SMOLLM2), ("after", run / "model")):
        loss[name] = last_turn_losses(model, own)
        gap[name] = last_turn_losses(model, swapped) - loss[name]
    return {
        "loss before": over_groups(loss["before"], trees),
        "change of the loss": over_groups(loss["after"] - loss["before"], trees),
        "gap before": over_groups(gap["before"], trees),
        "change of the gap": over_groups(gap["after"] - gap["before"], trees),
    }


def pairs(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return the held-out accuracy of a reward model or of DPO, which by length alone would be 0.5."""
    from benchmarks.gsm8k_steps import wilson
    from ptf.measurement import read_row_metrics

    found, n = read_row_metrics(run), len(rows(prepared / "held_out.jsonl"))
    accuracy, by_length = found["accuracy/held_out"], found["length_baseline_accuracy/held_out"]
    return {
        "accuracy": (accuracy, *wilson(accuracy, n)),
        "accuracy of the longer answer": (by_length, by_length, by_length),
    }


def answers(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return what training changed of greedy answers: reward, share of readable ones, accuracy of the readable."""
    from smollm2_rows import readable, right

    asked = rows(prepared / "test.jsonl")
    found = {}
    for name, file in (("before", "start_test"), ("after", "test")):
        given = [row["response"] for row in rows(run / "responses" / f"{file}.jsonl")]
        assert len(given) == len(asked)
        found[name] = np.array(
            [
                (right(row, text), readable(text) is not None, right(row, text) == 1)
                for row, text in zip(asked, given, strict=True)
            ],
            float,
        )
    each = range(len(asked))
    kinds = {"reward": 0, "share of readable answers": 1, "share of right answers": 2}
    result = {}
    for kind, column in kinds.items():
        before, after = found["before"][:, column], found["after"][:, column]
        result[f"{kind} before"] = over_groups(before, each)
        result[f"change of the {kind}"] = over_groups(after - before, each)
    return result | accuracy_of_readable(found["before"], found["after"])


def accuracy_of_readable(before: np.ndarray, after: np.ndarray) -> dict[str, Interval]:
    """Return the accuracy of the readable answers and its change, whose interval is of 2,000 samples of the questions
    (bootstrap), since the two have other readable answers."""
    draw = np.random.default_rng(0)

    def of(found: np.ndarray) -> float:
        return float(found[:, 2].sum() / max(1.0, found[:, 1].sum()))

    picks = [draw.integers(0, len(before), len(before)) for _ in range(2000)]
    values = {"before": [of(before[p]) for p in picks], "change": [of(after[p]) - of(before[p]) for p in picks]}
    low, high = ({name: float(np.quantile(each, end)) for name, each in values.items()} for end in (0.025, 0.975))
    return {
        "accuracy of the readable before": (of(before), low["before"], high["before"]),
        "change of the accuracy of the readable": (of(after) - of(before), low["change"], high["change"]),
    }


# --- running units ------------------------------------------------------------------------------------------------


def train_unit(name: str) -> Row:
    """Train and measure one unit in this process, and return its row of the ledger."""
    from ptf.config import load
    from ptf.evaluation import evaluate_run
    from ptf.run import prepared_directory
    from ptf.training_run import train

    unit, place = units()[name], OUTPUT / name.replace(", ", "_").replace(": ", "_").replace(" ", "-")
    began = time.monotonic()
    job = load(
        CONFIGS / f"{unit.config}.yaml",
        overrides=[
            f"seed={unit.seed}",
            f"output={place}",
            f"model.path={SMOLLM2 if not unit.after else unit_run(unit.after) / 'model'}",
            "compute={launcher: local, device: cpu, threads: 1}",
            "track={tensorboard: false}",
            *([f"data.prepare.args.model={SMOLLM2}"] if "sums" not in job_prepare(unit.config) else []),
            *unit.set,
        ],
    )
    made = train(job, "run")
    evaluate_run(made.job, made.directory)
    prepared = prepared_directory(made.job)
    assert prepared is not None
    steps = rows(made.directory / "metrics.jsonl")
    found = unit.measure(made.directory, Path(prepared))
    spent = resource.getrusage(resource.RUSAGE_SELF)
    inside = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "unit": name,
        "seed": unit.seed,
        "command": f"ptf train configs/smollm2/{unit.config}.yaml " + " ".join(f"--set {s}" for s in unit.set),
        "steps": len(steps),
        "tokens": sum(int(row.get("tokens", 0)) for row in steps),
        "precision": made.job.train.precision,
        "cpu_s": round(sum((spent.ru_utime, spent.ru_stime, inside.ru_utime, inside.ru_stime)), 1),
        "clock_s": round(time.monotonic() - began, 1),
        "found": found,
    }


def job_prepare(config: str) -> str:
    """Return the text of a config and of those that it extends."""
    text = (CONFIGS / f"{config}.yaml").read_text()
    base = next((line.split()[1] for line in text.splitlines() if line.startswith("extends:")), None)
    return text + (job_prepare(base.removesuffix(".yaml")) if base else "")


def unit_run(name: str) -> Path:
    """Return the directory of a unit's run."""
    return OUTPUT / name.replace(", ", "_").replace(": ", "_").replace(" ", "-") / "run"


@dataclass
class Ledger:
    """The rows of the units that were made at this commit."""

    here: str
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Keep a row, in the file too."""
        self.rows[row["unit"]] = row
        with KEPT.open("a") as file:
            file.write(json.dumps(row) + "\n")


def make(name: str, ledger: Ledger) -> None:
    """Make a unit in a process of its own, which has one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{CONFIGS}"}
    log = unit_run(name).parent.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__)), "--unit", name]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}: see {log}")
    ledger.add({**json.loads(done.stdout), "commit": ledger.here, "machine": cpu(), "date": time.strftime("%Y-%m-%d")})
    print(json.dumps(ledger.rows[name]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="UNIT", help="units whose names begin so")
    parser.add_argument("--anew", action="store_true", help="make units again that the ledger has")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.unit:
        with contextlib.redirect_stdout(sys.stderr):
            row = train_unit(asked.unit)
        print(json.dumps(row))
        return 0
    if not (SMOLLM2 / "config.json").exists():
        parser.error(f"there is no {SMOLLM2}: run `make models`, or set PTF_MODELS")
    ledger = Ledger(commit())
    if KEPT.exists():
        ledger.rows = {row["unit"]: row for row in rows(KEPT) if row["commit"] == ledger.here}
    wanted = [
        name
        for name in units()
        if (not asked.only or name.startswith(tuple(asked.only))) and (asked.anew or name not in ledger.rows)
    ]
    for first in (True, False):  # those that start from another unit's model come last
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: make(n, ledger), [n for n in wanted if (not units()[n].after) == first]))
    return page(ledger.rows)


# --- the page -----------------------------------------------------------------------------------------------------


def shown(value: Interval) -> str:
    """Return a mean and its interval as text."""
    return f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"


def page(found: Mapping[str, Row]) -> int:
    """Write the page from the rows; return 1 if a unit is not there."""
    missed = [name for name in units() if name not in found]
    lines = []
    titles = {
        "SFT": ["loss before", "change of the loss", "gap before", "change of the gap"],
        "DPO": ["accuracy", "accuracy of the longer answer"],
        "reward": ["accuracy", "accuracy of the longer answer"],
        "GRPO": [
            "reward before",
            "change of the reward",
            "share of readable answers before",
            "change of the share of readable answers",
            "accuracy of the readable before",
            "change of the accuracy of the readable",
        ],
    }
    for begin, columns in titles.items():
        here = [row for name, row in found.items() if name.startswith(begin) and columns[0] in row["found"]]
        here.sort(key=lambda row: list(units()).index(row["unit"]))
        if not here:
            continue
        lines += ["", f"## {'Reward model' if begin == 'reward' else begin}", ""]
        lines += ["| unit | " + " | ".join(columns) + " | steps | tokens | CPU-seconds |"]
        lines += ["|---|" + "---|" * (len(columns) + 3)]
        for row in here:
            cells = [shown(row["found"][column]) for column in columns]
            lines.append(
                f"| {row['unit']} | {' | '.join(cells)} | {row['steps']} | {row['tokens']:,} | {row['cpu_s']:.0f} |"
            )
    some = next(iter(found.values()), {"machine": cpu(), "date": time.strftime("%Y-%m-%d"), "commit": commit()})
    precisions = ", ".join(sorted({row["precision"] for row in found.values()}))
    about = (
        "# Training pretrained models\n\n"
        f"Command: `python benchmarks/real_models.py`  \nHardware: {some['machine']}, no GPU; two units at once, a "
        f"thread each; {precisions}  \nDate: {some['date']}, commit {some['commit']}\n\n"
        "SmolLM2-135M-Instruct, dequantised from GGUF (Q4_1), not the published weights. Each row is one job of\n"
        "[configs/smollm2](../../configs/smollm2/sft.yaml). Brackets are 95 % intervals: over trees of OpenAssistant\n"
        "for SFT, over pairs (Wilson) for accuracies of pairs, over questions for GRPO.\n\n"
        "*Gap*: the loss of the last answer after another tree's conversation, less its loss after its own. It grows\n"
        "only where a model uses the question more. In the control each training answer is another question's.\n"
        "Held-out pairs prefer the shorter answer half of the time.\n"
        "GRPO: 60 held-out questions, answered greedily; an answer is readable if it gives one number in digits.\n"
    )
    return write_page(RESULTS, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
