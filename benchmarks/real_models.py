"""What ptf does to pretrained models: SFT, DPO, a reward model and GRPO of SmolLM2-135M-Instruct, with controls; GRPO
of Qwen2.5-Coder-0.5B-Instruct with adapters; log-probs of the engines, memory, and the SFT step beside TRL's. Needs the
models (`make models`), the data (PTF_DATA) and for TRL its environment (`make peers`). Writes results/real_models.md,
and real_models.jsonl as it goes.

    python benchmarks/real_models.py [--only UNIT …] [--anew]

A unit is one training of a job of configs/ with one seed, and what it changed on held-out rows, or one measurement
(real_measures.py). Two units run at once, one thread each; TRL's runs alone. The ledger keeps each unit with its
commit; one that it has is made again only with --anew. Intervals are 95 % ones over rows, or over trees of
OpenAssistant where rows of a tree share their beginning.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
PLUGINS = [str(CONFIGS / "smollm2"), str(CONFIGS / "qwen2p5_coder")]
sys.path[:0] = [str(ROOT), *PLUGINS]

import numpy as np  # noqa: E402

from benchmarks.flow_runs import cpu, results_page  # noqa: E402
from benchmarks.pages import Row, here, keep, kept, table, today, told, write_page  # noqa: E402
from benchmarks.real_measures import Interval, beside_trl, exactly, grpo_beside_trl, logprobs, rewarded  # noqa: E402

MODELS = Path(os.environ.get("PTF_MODELS") or ROOT / "data" / "models")
SMOLLM2, CODER = MODELS / "smollm2-135m-instruct", MODELS / "qwen2.5-coder-0.5b-instruct"
OUTPUT = ROOT / "runs" / "real_models"
RESULTS = results_page("real_models.md")
KEPT = RESULTS.with_suffix(".jsonl")
ARGS = "data.prepare.args"
VLLM = ("rollout.engine=vllm", "train.steps=10", "compute.launcher=ray")  # it needs a process of its own


@dataclass(frozen=True)
class Unit:
    """One training: a config of configs/, what is changed in it, and how its result is measured."""

    config: str
    measure: Callable[[Path, Path], dict[str, Interval]]  # (run, prepared data) → what changed
    seed: int = 0
    set: tuple[str, ...] = ()
    after: str = ""  # the unit whose published model it starts from

    @property
    def model(self) -> Path:
        """The pretrained model that it starts from, or that its `after` started from."""
        return CODER if self.config.startswith("qwen") else SMOLLM2


@dataclass(frozen=True)
class Measurement:
    """What is measured of a model without training it."""

    measure: Callable[[], dict[str, Interval]]
    after: str = ""
    alone: bool = False  # on the machine


def units() -> dict[str, Unit | Measurement]:
    """Return all units by name; those that start from another unit's model come after it."""
    seeds = range(3)
    made: dict[str, Unit | Measurement] = {}
    made |= {f"SFT, seed {seed}": Unit("smollm2/sft", conversations, seed) for seed in seeds}
    made |= {
        f"SFT, learning rate {rate}": Unit("smollm2/sft", conversations, set=(f"train.lr={rate}",))
        for rate in ("1e-5", "2e-4")
    }
    made["SFT, LoRA"] = Unit("smollm2/sft_lora", conversations)
    made["SFT, control: answers permuted"] = Unit("smollm2/sft", conversations, set=(f"{ARGS}.permute=true",))
    made |= {f"DPO, seed {seed}": Unit("smollm2/dpo", pairs, seed) for seed in seeds}
    made["reward model, seed 0"] = Unit("smollm2/rm", pairs)
    made["form"] = Unit("smollm2/sums_form", answers)
    made |= {f"GRPO, seed {seed}": Unit("smollm2/grpo", answers, seed) for seed in seeds}
    control = (f"{ARGS}.shuffle_answers=true", "train.steps=10")
    made["GRPO, control: answers shuffled"] = Unit("smollm2/grpo", answers, set=control)
    made["GRPO, vLLM, 10 steps"] = Unit("smollm2/grpo", answers, set=VLLM)
    made |= {
        f"GRPO from the form, seed {seed}": Unit("smollm2/grpo_form", answers, seed, after="form") for seed in seeds
    }
    made["GRPO from the form, control: answers shuffled"] = Unit(
        "smollm2/grpo_form", answers, set=control, after="form"
    )
    made["coder, functions"] = Unit("qwen2p5_coder/code", rewarded)
    made["coder, tool"] = Unit("qwen2p5_coder/calculator", rewarded)
    for engine in ("native", "vllm"):
        for precision in ("fp32", "bf16"):
            of = functools.partial(logprobs, SMOLLM2, engine, precision)
            made[f"log-probs, {engine}, {precision}"] = Measurement(of)
    made["beside TRL"] = Measurement(functools.partial(beside_trl, SMOLLM2), alone=True)
    made["beside TRL, GRPO"] = Measurement(functools.partial(grpo_beside_trl, SMOLLM2), alone=True)
    return made


# --- what a training changed --------------------------------------------------------------------------------------


def over_groups(differences: Sequence[float], groups: Sequence[Any]) -> Interval:
    """Return the mean of the differences and its 95 % interval, where those of one group are not independent."""
    from ptf.evaluate.gate import quantile

    values, names = np.asarray(differences, float), np.asarray([str(g) for g in groups])
    mean = values.mean()
    sums = np.array([(values[names == name] - mean).sum() for name in np.unique(names)])
    n = len(sums)
    half = quantile(n - 1) * math.sqrt((sums**2).sum() * n / (n - 1)) / len(values)
    return float(mean), float(mean - half), float(mean + half)


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
    with joined("cpu", 600, threads=1) as world:
        assert isinstance(world, World)
        made = load_model(model, world, ModelConfig(path=str(model)), seed=0, precision="fp32", frozen=True)
        found = sample_logprobs(
            made, samples, world, seq_len=1024, micro_batch_sequences=1, processing=NO_LOGITS_PROCESSING
        )
    return np.array([-float(v.sum()) / float((s.loss_weights != 0).sum()) for v, s in zip(found, samples, strict=True)])


def conversations(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return what SFT changed of the held-out loss, and of the gap between another row's answer and the own one."""
    own, swapped = kept(prepared / "held_out.jsonl"), kept(prepared / "swapped.jsonl")
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
    from ptf.evaluate.measurement import read_row_metrics

    found, n = read_row_metrics(run), len(kept(prepared / "held_out.jsonl"))
    accuracy, by_length = found["accuracy/held_out"], found["length_baseline_accuracy/held_out"]
    return {
        "accuracy": (accuracy, *wilson(accuracy, n)),
        "accuracy of the longer answer": exactly(by_length),
    }


def answers(run: Path, prepared: Path) -> dict[str, Interval]:
    """Return what training changed of greedy answers: reward, share of readable ones, accuracy of the readable."""
    from smollm2_rows import readable, right  # pyright: ignore[reportMissingImports]

    asked = kept(prepared / "test.jsonl")
    found = {}
    for name, file in (("before", "start/test"), ("after", "test")):
        given = [row["response"] for row in kept(run / "responses" / f"{file}.jsonl")]
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
    began = time.monotonic()
    unit = units()[name]
    row = {"unit": name, "found": unit.measure()} if isinstance(unit, Measurement) else trained(name, unit)
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return row | {
        "cpu_s": round(sum(used.ru_utime + used.ru_stime for used in spent), 1),
        "clock_s": round(time.monotonic() - began, 1),
    }


def trained(name: str, unit: Unit) -> Row:
    """Train a unit, evaluate what it made and measure what changed."""
    from ptf.config import load
    from ptf.evaluate.evaluation import evaluate_run
    from ptf.run import prepared_directory
    from ptf.train.budget import GIB, budget
    from ptf.training_run import train

    model = unit_run(unit.after) / "model" if unit.after else unit.model
    sized = unit.config.split("/")[1] in ("sft", "sft_lora", "dpo", "rm")  # their rows have at most so many tokens
    job = load(
        CONFIGS / f"{unit.config}.yaml",
        overrides=[
            f"seed={unit.seed}",
            f"output={unit_run(name).parent}",
            f"model.path={model}",
            "compute={launcher: local, device: cpu, threads: 1}",
            "track.tensorboard=false",
            *([f"{ARGS}.model={unit.model}"] if sized else []),
            *unit.set,
        ],
    )
    made = train(job, "run")
    evaluate_run(made.job, made.directory)
    prepared = prepared_directory(made.job)
    assert prepared is not None
    steps = kept(made.directory / "metrics.jsonl")
    memory: Row = {}
    if sized:
        plan = budget(made.job, model, 1, room_gib=80)
        memory = {
            "plan_gib": round(plan.memory.total / GIB, 2),
            "peak_gib": max(row["peak_memory_gib"] for row in steps if "peak_memory_gib" in row),
        }
    return {
        "unit": name,
        "seed": unit.seed,
        "command": f"ptf train configs/{unit.config}.yaml " + " ".join(f"--set {s}" for s in unit.set),
        "steps": len(steps),
        "tokens": sum(int(row.get("tokens", row.get("sampled_tokens", 0))) for row in steps),
        "precision": made.job.train.precision,
        **memory,
        "found": unit.measure(made.directory, Path(prepared)),
    }


def unit_run(name: str) -> Path:
    return OUTPUT / name.replace(", ", "_").replace(": ", "_").replace(" ", "-") / "run"


def make(name: str, about: Row) -> None:
    """Make a unit in a process of its own, which has one thread, and keep its row."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *PLUGINS])}
    log = unit_run(name).parent.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__)), "--unit", name]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}: see {log}")
    row = json.loads(done.stdout) | about
    keep(KEPT, row)
    print(json.dumps(row), flush=True)


def alone(unit: Unit | Measurement) -> bool:
    """Return whether a unit is made while no other one is."""
    return isinstance(unit, Measurement) and unit.alone


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
    known, about = {row["unit"] for row in kept(KEPT)}, here()
    about["machine"] = about.pop("hardware")
    wanted = [
        name
        for name in units()
        if (not asked.only or name.startswith(tuple(asked.only))) and (asked.anew or name not in known)
    ]
    whole = units()
    first = [name for name in wanted if not whole[name].after and not alone(whole[name])]
    then = [name for name in wanted if whole[name].after]  # those that start from another unit's model
    for at_once, names in ((2, first), (2, then), (1, [name for name in wanted if alone(whole[name])])):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda name: make(name, about), names))
    return page({row["unit"]: row for row in kept(KEPT)})  # the newest of each


# --- the page -----------------------------------------------------------------------------------------------------


def shown(value: Interval, digits: int = 3) -> str:
    """Return a mean and its interval as text; a value that has none alone."""
    mean, low, high = (f"{each:.{digits}f}" for each in value)
    return f"{mean} [{low}, {high}]" if low != high else f"{value[0]:g}"


ACCURACY = "change of the accuracy of the readable"
OF_ANSWERS = {
    "reward before": "reward before",
    "change of the reward": "change",
    "share of readable answers before": "readable before",
    "change of the share of readable answers": "change",
    "accuracy of the readable before": "accuracy of the readable before",
    "change of the accuracy of the readable": "change",
}
OF_CODER = {
    "rate before": "solved before",
    "rate after": "after 5 steps",
    "mean reward before": "mean reward before",
    "mean reward after": "after",
    "rewards in training": "rewards in training",
    "of them computed again otherwise": "of them computed again otherwise",
}
OF_PAIRS = ("accuracy", "accuracy of the longer answer")
# title, how the names of its units begin, columns
TRAININGS: Sequence[tuple[str, tuple[str, ...], Mapping[str, str]]] = (
    ("SFT", ("SFT",), {c: c for c in ("loss before", "change of the loss", "gap before", "change of the gap")}),
    ("DPO", ("DPO",), {c: c for c in OF_PAIRS}),
    ("Reward model", ("reward",), {c: c for c in OF_PAIRS}),
    ("GRPO on sums", ("form", "GRPO"), OF_ANSWERS),
    ("GRPO of the 0.5B, with adapters", ("coder",), OF_CODER),
)


LEARNED = (  # what should grow, how the names of its units begin, and the column
    ("SFT, growth of the gap", "SFT, seed", "change of the gap"),
    ("GRPO from the form, growth of the accuracy of readable answers", "GRPO from the form, seed", ACCURACY),
    ("the same where its control has shuffled answers", "GRPO from the form, control", ACCURACY),
    ("GRPO from the instruct model itself", "GRPO, seed", ACCURACY),
    ("the same where its control has shuffled answers", "GRPO, control", ACCURACY),
)


def page(found: Mapping[str, Row]) -> int:
    """Write the page from the rows; return 1 if a unit is not there."""
    order = list(units())
    made = sorted((row for row in found.values() if row["unit"] in order), key=lambda row: order.index(row["unit"]))
    lines = list[str]()
    for title, begins, columns in TRAININGS:
        header = ["unit", *columns.values(), "steps", "tokens", "precision", "CPU-seconds", "commit"]
        cells = []
        for row in (row for row in made if row["unit"].startswith(begins)):
            spent = f"{row['cpu_s']:.0f}" if row["cpu_s"] else "not kept"
            found_of = [shown(row["found"][column]) for column in columns]
            about_it = [row["steps"], f"{row['tokens']:,}", row["precision"], spent, row["commit"]]
            cells.append([row["unit"], *found_of, *about_it])
        if not cells:
            continue
        lines += ["", f"## {title}", "", ABOUT.get(title, ""), "", table(header, cells)]
    if measured := [row for row in made if row["unit"].startswith("log-probs")]:
        names = list(measured[0]["found"])
        cells = [
            [row["unit"].removeprefix("log-probs, "), *(f"{row['found'][n][0]:.3g}" for n in names), row["commit"]]
            for row in measured
        ]
        lines += ["", "## Log-probs of the engines beside the trainer's", "", ABOUT["log-probs"], ""]
        lines.append(table(["engine, precision", *names, "commit"], cells))
    cells = [
        [row["unit"], row["precision"], f"{row['plan_gib']:.2f}", f"{row['peak_gib']:.2f}"]
        for row in made
        if "plan_gib" in row
    ]
    lines += ["", "## Memory beside the plan", "", ABOUT["memory"], ""]
    lines.append(table("unit | precision | plan, GiB | most that was resident, GiB", cells))
    for row in made:
        if row["unit"] in BESIDE:
            heading, column = BESIDE[row["unit"]]
            lines += ["", f"## {heading}", "", ABOUT[row["unit"]].format(row["commit"]), ""]
            lines.append(table(["", column], [[n, shown(value, 2)] for n, value in row["found"].items()]))
    lines += ["", "## Commands", ""] + [f"- {r['unit']}: `{r['command'].strip()}`" for r in made if "command" in r]
    machines = told(made, "machine") or cpu()
    learned = [
        f"- {what}: beyond its interval on {sum(row['found'][column][1] > 0 for row in some)} of {len(some)} seeds."
        for what, begin, column in LEARNED
        if (some := [row for row in made if row["unit"].startswith(begin)])
    ]
    date = max((row["date"] for row in made), default=today())
    about = (
        "# Training pretrained models\n\n"
        f"Command: `python benchmarks/real_models.py`  \nHardware: {machines}, no GPU; two units at once, a thread "
        f"each  \nDate: {date}\n\n{ABOUT['page']}\n\n" + "\n".join(learned) + "\n"
    )
    return write_page(RESULTS, about, lines, [name for name in order if name not in found])


BESIDE = {
    "beside TRL": ("The SFT step beside TRL's", "tokens per CPU-second, or ratio"),
    "beside TRL, GRPO": ("The GRPO step beside TRL's", "CPU-seconds a step, or ratio"),
}
ABOUT = {
    "page": (
        "SmolLM2-135M-Instruct (Q4_1) and Qwen2.5-Coder-0.5B-Instruct (Q4_K_M), dequantised from GGUF: not the\n"
        "published weights. Each row is one job of [configs/smollm2](../../configs/smollm2/sft.yaml) or\n"
        "[configs/qwen2p5_coder](../../configs/qwen2p5_coder/code.yaml). Brackets are 95 % intervals: over trees of\n"
        "OpenAssistant for SFT, over pairs or tasks (Wilson) for rates, over questions for GRPO on sums."
    ),
    "SFT": (
        "*Gap*: the loss of the last answer after another tree's conversation, less its loss after its own. It grows\n"
        "where a model uses the question more. In the control each training answer is another question's.\n\n"
        "Where it does not grow, the loss of another row's answer falls as much as that of the own one (the two\n"
        "changes differ by that of the gap): the model learns how these people write, which serves both answers."
    ),
    "DPO": (
        "About half of the held-out pairs prefer the shorter answer: length alone scores about 0.5. One pass over\n"
        "200 pairs teaches no preference that 108 held-out pairs would show: every interval holds 0.5."
    ),
    "Reward model": "The same pairs, and the same result; one seed, since nothing is claimed.",
    "GRPO on sums": (
        "100 held-out questions, answered greedily before and after. An answer is readable if it gives one number in\n"
        "digits. *form*: SFT on facts with one number, without arithmetic. In the controls the training\n"
        "questions have the answers of others. Learning rates and the length of *form* were chosen by trials on\n"
        "seed 0 with these questions. Tokens of GRPO are the sampled ones."
    ),
    "GRPO of the 0.5B, with adapters": (
        "100 held-out tasks, greedy. Five steps of 64 responses show that all parts work on a real model; they are no\n"
        "claim of learning. Every reward of the training was computed again from the stored text. With the tool the\n"
        "model wrote each call as bare JSON, without the tags of its own template: that is no call, so nothing was\n"
        "solved, before or after."
    ),
    "log-probs": "160 responses of 128 tokens at temperature 1; engine and trainer have one precision. Nats.",
    "memory": (
        "The plan counts a GPU's memory: weights, gradients, optimizer, and the activations of a full sequence. What\n"
        "was resident has Python and its libraries too (about half a GiB)."
    ),
    "beside TRL": (
        "fp32, one sequence of 1,024 tokens a step, one thread; real tokens per CPU-second, median and range of three\n"
        "interleaved rounds, the same weights, tokens and losses ([train_step.md](train_step.md) says how).\n"
        "Commit {}."
    ),
    "beside TRL, GRPO": (
        "fp32, 4 prompts of 64 tokens, 4 responses of 128 tokens to each, one thread. CPU-seconds of a whole\n"
        "step, from prompts to new weights in the engine: the second of two. Three interleaved rounds of ptf and\n"
        "of TRL at its fastest setting, one of its others. [grpo_step.md](grpo_step.md) says how. Commit {}."
    ),
}


if __name__ == "__main__":
    sys.exit(main())
