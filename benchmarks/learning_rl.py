"""Does online training learn what it should, on every seed, and does it not where it must not? One small model (2
layers of 64), tasks of a few digits, our own decoder as the engine, everything in one process. Keeps what was found in
results/learning_rl.jsonl, and writes results/learning_rl.md from it; exits 1 where a bar is missed or a check was not
made. What is kept of a check with its present settings is not made again (--again does).

    python benchmarks/learning_rl.py [--seeds 0 1 …] [--only NAME …] [--processes 1] [--minutes 60] [--again]

    count      from random weights: the next four digits after one; reward: the share of them that is right
    reverse    six digits turned round, from a model that SFT was stopped on early; reward: an answer that is right
    calculate  an agent that has to ask a calculator and to say what it answered (ptf.tasks.calculator), from SFT
               that was stopped early
"""

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# of the processes that find rewards
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import results_page  # noqa: E402
from benchmarks.learning import SEEDS, origins, write_rows  # noqa: E402
from benchmarks.pages import Row, here, kept, table, write_page  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.data.document import Document, PackUnit  # noqa: E402
from ptf.data.trajectory import Group  # noqa: E402
from ptf.errors import Stopped, UserError  # noqa: E402
from ptf.recipes.grpo.recipe import GRPO  # noqa: E402
from ptf.rl import controller  # noqa: E402
from ptf.rl.cluster import LocalRoleGroup  # noqa: E402
from ptf.rl.weights.verification import SyncError  # noqa: E402
from ptf.run import run  # noqa: E402
from ptf.tasks import calculator  # noqa: E402
from ptf.tasks.tiny import write_model  # noqa: E402

RESULTS = results_page("learning_rl.md")
KEPT = RESULTS.with_suffix(".jsonl")  # a line a check and seed, with the settings that it was made with


def share(row: Mapping[str, Any], text: str) -> float:
    """Of the answer's characters, those that are right, and in their place."""
    return sum(a == b for a, b in zip(text, row["answer"], strict=False)) / len(row["answer"])


class Flipped(GRPO):
    """What was good is made less likely."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        def negated(s: Document) -> Document:
            columns = {**s.token_columns, "advantages": -s.token_columns["advantages"]}
            return Document(s.tokens, s.loss_weights, s.source, columns)

        return [tuple(map(negated, unit)) for unit in super().compute_advantages(groups)]


class Uncorrected(GRPO):
    """GRPO without the importance weights of tokens that earlier weights sampled."""

    def loss(self, model: Any, batch: Any, frozen_models: Any) -> Any:
        return GRPO.loss(self.with_keys(tis_cap=None), model, batch, frozen_models)


def shifted(samples: Callable[..., list[Document]]) -> Callable[..., list[Document]]:
    """Samples whose mask is one token too early."""

    def made(*args: Any) -> list[Document]:
        return [
            Document(
                s.tokens, np.roll(s.loss_weights, -1), s.source, {k: np.roll(v, -1) for k, v in s.token_columns.items()}
            )
            for s in samples(*args)
        ]

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

    def made(self: LocalRoleGroup, method: str, *args: Any, **options: Any) -> Any:
        if self.spec.name == "rollout" and method == "load" and args[1].version > 0:
            self.role.engine.version = args[1].version
            return type("Receipt", (), {"version": args[1].version, "tensors": len(args[1].digests)})()
        return call(self, method, *args, **options)

    return made


@dataclass(frozen=True)
class Check:
    task: str
    recipe: str | dict = "grpo"
    algo: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 250
    lr: float = 1e-3
    schedule: str = "constant"
    rollout: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    teacher: bool = False
    imitated: int | None = None  # steps of SFT that come first; None: STOPPED
    bar: str = "reward reaches 0.95"


def stale(k: int, slice_tokens: int = 1) -> dict[str, Any]:
    """Return the keys of `rollout` with which every group is trained k steps after it was admitted."""
    return {"max_staleness": k, "slice_tokens": slice_tokens, "in_flight": 32 * (1 + k)} if k else {}


TWICE = {"update_epochs": 2}
# of advantages whose deviation is 1; without it some prompts settle on a wrong answer, and all agree on it
EXPLORING = TWICE | {"entropy_coef": 0.05}
# with 0.05 and the higher rate of these checks, one seed of three settled on wrong answers at k = 1 and at k = 2
STALE_EXPLORING = TWICE | {"entropy_coef": 0.1}
CHECKS = {
    "GRPO": Check("count", algo=EXPLORING),
    "RLOO": Check("count", algo=TWICE | {"baseline": "leave_one_out", "scale_by_std": False, "entropy_coef": 0.02}),
    "Dr.GRPO": Check(
        "count", algo=TWICE | {"scale_by_std": False, "loss_aggregation": "constant_length", "entropy_coef": 0.01}
    ),
    "DAPO": Check(
        "count",
        algo=EXPLORING | {"clip_high": 0.28, "overlong_buffer_tokens": 2, "entropy_coef": 0.1},
        steps=300,
        rollout={"max_resampling_rounds": 3, "max_new_tokens": 8},
    ),
    "GSPO": Check(
        "count",
        algo=EXPLORING
        | {
            "importance_sampling_level": "sequence",
            "loss_aggregation": "episode_mean",
            "clip_low": 0.1,
            "clip_high": 0.1,
        },
    ),
    "GRPO, KL to the reference": Check("count", algo=EXPLORING | {"kl_coef": 0.003}),
    "GRPO, LoRA": Check(
        "reverse",
        algo=TWICE,
        model={"lora": {"rank": 32, "alpha": 64}},
        lr=2e-3,
        steps=60,
        schedule="cosine",
        imitated=80,
        bar="greedy_pass_rate ≥ 0.99",
    ),
    # with 0.95 a seed of five settled on wrong answers
    "PPO": Check("count", "ppo", EXPLORING | {"value_clip": 10.0, "critic_lr": 3e-3, "lam": 1.0}),
    "SFT, then GRPO": Check(
        "reverse", algo=TWICE, steps=60, lr=3e-4, schedule="cosine", imitated=80, bar="greedy_pass_rate ≥ 0.99"
    ),
    "SFT, then PPO": Check(
        "reverse",
        "ppo",
        TWICE | {"value_clip": 10.0, "critic_lr": 1e-3, "lam": 1.0},
        steps=80,
        lr=3e-4,
        schedule="cosine",
        imitated=80,
        bar="greedy_pass_rate ≥ 0.99",
    ),
    # from a model that was stopped earlier, one seed of ten settled on wrong answers: the divergence is measured on the
    # student's answers only
    "On-policy distillation": Check(
        "reverse", "opd", steps=200, teacher=True, schedule="cosine", imitated=80, bar="greedy_pass_rate ≥ 0.99"
    ),
    "SFT, then GRPO, calculator": Check(
        "calculate",
        algo=TWICE,
        steps=100,
        rollout={"environment": {"use": "ptf.tasks.calculator:Calculator"}, "max_new_tokens": 4},
    ),
    **{
        f"GRPO, k = {k}": Check(
            "count", algo=STALE_EXPLORING, steps=200, lr=2e-3, schedule="cosine", rollout=stale(k, slice_tokens=4)
        )
        for k in (0, 1, 2, 4, 8)
    },
    **{
        f"SFT, then GRPO, k = {k}": Check(
            "reverse",
            algo=TWICE,
            steps=60,
            lr=3e-4,
            schedule="cosine",
            imitated=80,
            rollout=stale(k),
            bar="greedy_pass_rate ≥ 0.99",
        )
        for k in (1, 2, 4, 8)
    },
    **{
        f"SFT, then GRPO, calculator, k = {k}": Check(
            "calculate",
            algo=TWICE,
            steps=100,
            rollout={"environment": {"use": "ptf.tasks.calculator:Calculator"}, "max_new_tokens": 4, **stale(k)},
        )
        for k in (1, 2, 4, 8)
    },
    "control: k = 8, uncorrected": Check(
        "count",
        {"use": "benchmarks.learning_rl:Uncorrected", "args": {}},
        STALE_EXPLORING | {"tis_cap": 2.0},
        steps=200,
        lr=2e-3,
        schedule="cosine",
        rollout=stale(8, slice_tokens=4),
        bar="never reaches 0.95",
    ),
    "control: targets shuffled": Check("shuffled", algo=EXPLORING, steps=200, bar="reward < 0.15"),
    "control: advantages flipped": Check(
        "count", {"use": "benchmarks.learning_rl:Flipped", "args": {}}, TWICE, steps=100, bar="reward < 0.15"
    ),
    "control: weights never synced": Check("count", algo=TWICE, steps=5, bar="stopped at its first sync"),
    "control: mask off by one": Check("count", algo=TWICE, steps=5, bar="stopped at its first step"),
}


def met(bar: str, found: Mapping[str, Any], steps: int) -> bool:
    if bar.startswith("stopped"):
        return found["stopped"]
    if bar == "never reaches 0.95":
        return found["reached"] is None
    if bar == "reward reaches 0.95":
        return found["reached"] is not None and found["reached"] <= steps
    name, sign, number = bar.split()
    value = found["greedy_pass_rate" if name == "greedy_pass_rate" else "reward"]
    return value >= float(number) if sign == "≥" else value < float(number)


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
                write_rows(
                    place / "shuffled.jsonl", [row | {"answer": a} for row, a in zip(counts, answers, strict=True)]
                ),
                str(place / "count_test.jsonl"),
            ),
            "reverse": (
                write_rows(place / "reverse.jsonl", turned[:-200]),
                write_rows(place / "reverse_test.jsonl", turned[-200:]),
            ),
            "calculate": (str(place / "calculate" / "train.jsonl"), str(place / "calculate" / "test.jsonl")),
        }
        reversals = [
            {"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in turned[:-200]
        ]
        self.chats = {
            "reverse": write_rows(place / "reversals.jsonl", reversals),
            "calculate": str(place / "calculate" / "calls.jsonl"),
        }

    def raw(self, model: Path, steps: int, lr: float) -> dict[str, Any]:
        return {
            "output": str(self.place / "runs"),
            "seed": self.seed,
            "data": {"seq_len": 128},
            "model": {"path": str(model), "init": "pretrained" if (model / "model.safetensors").exists() else "random"},
            "train": {
                "steps": steps,
                "lr": lr,
                "precision": "fp32",
                "schedule": "constant",
                "global_batch_sequences": 8,
            },
            "compute": {"launcher": "local", "device": "cpu", "threads": 1},
            "track": {"tensorboard": False, "print_every": 1000},
            "checkpoint": {"every": 10_000},
        }

    def imitated(self, steps: int, task: str) -> Path:
        """SFT on right answers for so many steps."""
        raw = self.raw(self.place / ("calculate" if task == "calculate" else "") / "model", steps, 2e-3) | {
            "recipe": "sft"
        }
        raw["data"] = {"seq_len": 128, "sources": {"chats": {"path": self.chats[task]}}}
        return self.run(raw, f"sft-{task}-{steps}") / "model"

    def run(self, raw: Mapping[str, Any], name: str) -> Path:
        made = self.place / "runs" / name
        if not (made / "model" / "model.safetensors").exists():
            with contextlib.redirect_stdout(sys.stderr):
                run(loads(yaml.safe_dump(dict(raw))), name)
        return made

    def check(self, name: str, check: Check) -> dict[str, Any]:
        """The mean reward of the last ten steps, greedy accuracy on held-out prompts before and after, and whether a
        check of the weights stopped it."""
        start = (
            self.place / "model"
            if check.task in ("count", "shuffled")
            else self.imitated(check.imitated or STOPPED[check.task], check.task)
        )
        train, test = self.files[check.task]
        raw = self.raw(start, check.steps, check.lr) | {"recipe": check.recipe, "algo": dict(check.algo)}
        if check.teacher:
            raw["algo"]["teacher"] = str(self.imitated(TAUGHT, check.task))
        raw["model"] |= check.model
        raw["data"]["sources"] = {"prompts": {"path": train, "kind": "prompt"}}
        raw["rollout"] = {
            "engine": "native",
            "prompts_per_step": 32,
            "group_size": 8,
            "max_new_tokens": 4 if check.task != "reverse" else 7,
            **check.rollout,
        }
        if "environment" not in raw["rollout"]:
            raw["rollout"]["reward"] = {
                "use": "ptf.rl.rewards:exact" if check.task == "reverse" else "benchmarks.learning_rl:share"
            }
        raw["evaluate"] = {
            "sources": {"test": {"path": test, "kind": "prompt"}},
            "max_new_tokens": raw["rollout"]["max_new_tokens"],
        }
        raw["train"] |= {"validate_every": check.steps, "schedule": check.schedule}
        label, faulty = "".join(c if c.isalnum() else "_" for c in name), contextlib.ExitStack()
        with faulty:
            if name == "control: mask off by one":
                faulty.enter_context(patched(controller, "samples_of", shifted(controller.samples_of)))
            if name == "control: weights never synced":
                faulty.enter_context(patched(LocalRoleGroup, "call", unsynced(LocalRoleGroup.call)))
            try:
                made = self.run(raw, label)
            except Stopped:  # by a signal: nothing was found
                raise
            except (SyncError, UserError) as error:
                at = len(read_metrics(self.place / "runs" / label / "metrics.jsonl"))
                stopped = at == 0 and isinstance(error, SyncError)
                return {
                    "stopped": stopped,
                    "reached": None,
                    "said": str(error),
                    "reward": float("nan"),
                    "greedy_pass_rate": float("nan"),
                    "steps": at,
                }
        rows = read_metrics(made / "metrics.jsonl")
        reached = next(
            (i + 1 for i in range(len(rows)) if np.mean([r["reward"] for r in rows[max(0, i - 9) : i + 1]]) >= 0.95),
            None,
        )
        return {
            "stopped": False,
            "reward": float(np.mean([r["reward"] for r in rows[-10:]])),
            "greedy_pass_rate": rows[-1]["greedy_pass_rate/test"],
            "reached": reached,
            "first": rows[0]["reward"],
        }


STOPPED, TAUGHT = {"reverse": 60, "calculate": 40}, 400  # steps of SFT: of the model to go on from, and of the teacher


def main() -> int:
    wanted = options(
        __doc__,
        seeds=list(SEEDS),
        only=(CHECKS, "these checks alone; of the others, what is kept is what the page shows"),
        processes=(1, "seeds that are looked at side by side, one thread each"),
        minutes=(math.inf, "after which no further check is begun"),
        again=(False, "also what is kept"),
    )
    until = time.time() + 60 * wanted.minutes
    known = set() if wanted.again else {(row["check"], row["seed"]) for row in valid()}
    names = {seed: [name for name in wanted.only if (name, seed) not in known] for seed in wanted.seeds}
    seeds = [seed for seed in wanted.seeds if names[seed]]
    with ProcessPoolExecutor(wanted.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(seed_alone, seeds, [names[seed] for seed in seeds], [until] * len(seeds)))
    return write()


def settings(name: str) -> dict[str, Any]:
    """Of a check, as they are written down."""
    check = CHECKS[name]
    own = {check.task: check.imitated} if check.imitated else {}
    given = {key: value for key, value in asdict(check).items() if key != "imitated"}
    return json.loads(json.dumps({**given, "sft": [STOPPED | own, TAUGHT]}))


def valid() -> list[Row]:
    """What was found with the settings that the checks have now."""
    return [row for row in kept(KEPT) if row["check"] in CHECKS and holds(row)]


def holds(row: Mapping[str, Any]) -> bool:
    """Whether what was found holds for the settings of today: they are the same, or the run had more steps of a
    constant learning rate, of which the first are those of today's run."""
    now, then = settings(row["check"]), row["settings"]
    longer = now["schedule"] == "constant" and then["steps"] > now["steps"]
    return then == now or (longer and {**then, "steps": now["steps"]} == now)


def keep(found: Sequence[Mapping[str, Any]]) -> None:
    """Replaces what there is of the same checks and seeds."""
    about = here()
    new = [{**row, "settings": settings(row["check"]), **about} for row in found]
    known = {(row["check"], row["seed"]) for row in new}
    lock = os.open(KEPT.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of processes side by side
        rows = [row for row in valid() if (row["check"], row["seed"]) not in known] + new
        rows.sort(key=lambda row: (list(CHECKS).index(row["check"]), row["seed"]))
        write_rows(KEPT, rows)
    finally:
        os.close(lock)


def seed_alone(seed: int, names: Sequence[str], until: float) -> None:
    """These checks of one seed, each kept as soon as it was made; none is begun after `until`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        made = Seed(Path(directory), seed)
        for name in names:
            if time.time() > until:
                return
            start = time.process_time()
            found = made.check(name, CHECKS[name])
            keep([{"check": name, "seed": seed, **found}])
            spent = round(time.process_time() - start, 1)
            print(json.dumps({"seed": seed, "check": name, **found, "cpu_s": spent}), flush=True)


def write() -> int:
    """The page, of all that is kept. A check that was not made misses its bar."""
    rows = valid()
    found = {
        name: [{row["seed"]: row for row in rows if row["check"] == name}.get(seed) for seed in SEEDS]
        for name in CHECKS
    }
    missing = sum(one is None for of in found.values() for one in of)
    lines, missed = [], []
    for name, of in found.items():
        check = CHECKS[name]
        cells = [shown(check.bar, one) if one else "not run" for one in of]
        good = [met(check.bar, one, check.steps) for one in of if one is not None]
        lines.append([name, check.task, f"{check.bar}, {check.steps} steps", *cells, f"{sum(good)} of {len(good)}"])
        missed += [name] * (sum(good) < len(of))
    about = (
        "# Learning checks of online training\n\n"
        "Command: `python benchmarks/learning_rl.py` (`make learning-rl`)  \nHardware, date and commit: by seed, "
        "below; one thread, no GPU\n\n"
        + (
            f"**{missing} checks of {len(SEEDS)} seeds were not made yet**, for which there was no time: `not run`.\n\n"
            if missing
            else ""
        )
        + "One Qwen3 shape of 2 layers of 64, our own decoder as the engine; "
        "32 prompts with 8 answers each in a step.\n\n"
        "* `count`: from random weights, the next four digits after one; "
        "the reward is the share of them that is right.\n"
        "* `reverse`: six digits turned round, from a model that SFT was stopped on after "
        f"80 steps; the reward is 1 for the right answer. "
        "200 held-out numbers.\n"
        "* `calculate`: an agent that has to ask a calculator and to say what it answered, "
        f"from SFT that was stopped after {STOPPED['calculate']} steps.\n\n"
        "`at step` is the first at which the mean reward of ten steps is 0.95; "
        "a reward by itself is the mean of the last ten steps; greedy_pass_rate is of greedy answers, on\n"
        "held-out prompts, at the end. Of a run that was longer than the bar, what was reached within the bar counts.\n"
        "`shuffled`: every prompt has another's targets. "
        "Controls must fail as their bar says.\n`k` is `rollout.max_staleness`, with all of 32 × (1 + k) prompts in "
        "flight, so that a group is trained k steps after it was admitted; a slice has four tokens in `count`, which "
        "are a whole response, and one in the other tasks, whose responses are sampled by several versions.\n\n"
    )
    stale = (
        "\n## Staleness\n\nThe mean reward of the last ten steps, its mean over seeds and the 95 % interval of that "
        "mean (Student's t).\n"
    )
    made = table(["check", "task", "bar", *(f"seed {seed}" for seed in SEEDS), ""], lines)
    return write_page(RESULTS, about, [made, stale, staleness_table(rows), "", origins(rows)], missed)


STALE_TASKS = {
    "count": "GRPO, k = {}",
    "reverse": "SFT, then GRPO, k = {}",
    "calculate": "SFT, then GRPO, calculator, k = {}",
}
SYNCHRONOUS = {"reverse": "SFT, then GRPO", "calculate": "SFT, then GRPO, calculator"}  # where k = 0 has no check
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by number of seeds


def staleness_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the rewards at which runs end, by task and k."""
    ks, lines = (0, 1, 2, 4, 8), []
    for task, name in STALE_TASKS.items():
        checks = [SYNCHRONOUS.get(task, name.format(0)), *(name.format(k) for k in ks[1:])]
        checks += ["control: k = 8, uncorrected"] if task == "count" else []
        cells = [interval([row["reward"] for row in rows if row["check"] == check]) for check in checks]
        lines.append([task, *cells, *(["–"] if task != "count" else [])])
    return table(["task", *(f"k = {k}" for k in ks), "k = 8, uncorrected"], lines)


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "not run" if not values else f"{values[0]:.3f} (1 seed)"
    half = STUDENT_T[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f} ({len(values)} seeds)"


def shown(bar: str, one: Mapping[str, Any]) -> str:
    if bar.startswith("stopped"):
        return "stopped" if one["stopped"] else "went on"
    if bar.startswith("greedy_pass_rate"):
        return f"{one['greedy_pass_rate']:.3f}"
    return f"at step {one['reached']}" if one["reached"] is not None and "reaches" in bar else f"{one['reward']:.3f}"


if __name__ == "__main__":
    from benchmarks import learning_rl  # plugins are resolved by that name

    sys.exit(learning_rl.main())
