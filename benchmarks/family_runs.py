"""SFT, LoRA, DPO and GRPO (native engine) of tiny models of families with linear or latent attention, each from its
config to a published model. Writes results/family_runs.md.

    python benchmarks/family_runs.py [FAMILY ...]

What a run publishes is loaded by transformers before, and must give the trained model's log-probs. Exits 1 if a job
fails, or if what it trains on does not get better by a least amount: the held-out loss, DPO's held-out accuracy,
GRPO's reward.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from benchmarks.pages import write_page  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402

RESULTS = results_page("family_runs.md")
FAMILIES = ("qwen3_5", "qwen3_next", "deepseek_v3")
WINDOW = 5  # measurements over which a metric is averaged, or a fifth of them
TIMEOUT_S = 1800
NUMBERS = "high: 20, held_out: 75"  # the task, as in configs/families
LARGER = 30  # numbers of LoRA
PROMPTS = 32  # of GRPO


@dataclass(frozen=True)
class Work:
    """A job of the table: its configs, what is set in them, and the metric that must get better."""

    name: str
    config: str
    settings: tuple[str, ...]
    metric: str
    rises: bool
    least: float  # by which it must get better: more than the noise of a mean over the window


def works(family: str) -> tuple[Work, ...]:
    """Return the jobs of a family; those after the first go on from what the first publishes."""
    own = f"configs/families/{family}.yaml"
    start = f"model.path=job:{own}"
    small = ("compute.threads=1", "compute.launcher=local", "publish.gate=off", "evaluate.engine=native")
    adapter = (
        "model.init=pretrained",
        # of attention alone: PEFT has no format for adapters beside shared experts
        "model.lora={rank: 8, alpha: 16, targets: ['layers.*.attn.*_proj']}",
        "train.steps=150",
        "train.lr=3e-3",
        "train.warmup_steps=10",
        "train.validate_every=10",
        # with SFT's own numbers so few weights gain 0.02
        f"data.prepare.args.high={LARGER}",
        "publish.what=both",
    )
    # without warm-up DPO's margins are negative in the first steps
    preference = (
        f"data.prepare.args={{{NUMBERS}}}",
        "train.steps=120",
        "train.lr=2e-4",
        "train.warmup_steps=10",
        "train.validate_every=5",
    )
    # few prompts, each answered in every step: with all 638 a prompt would come up three times in so short a run, and
    # the reward would hardly move (a Qwen3's: from 0.22 to 0.27)
    rollout = (
        f"data.prepare.args={{{NUMBERS}, train: {PROMPTS}}}",
        "rollout.engine=native",
        f"rollout.prompts_per_step={PROMPTS}",
        "train.steps=60",
        "train.lr=1e-4",
        "train.warmup_steps=5",
    )
    return (
        Work("SFT", own, (), "loss/dev", rises=False, least=0.2),
        Work("LoRA", own, (start, *small, *adapter), "loss/dev", rises=False, least=0.2),
        Work("DPO", "configs/tiny/dpo.yaml", (start, *small, *preference), "accuracy/dev", rises=True, least=0.05),
        Work("GRPO", "configs/tiny/grpo.yaml", (start, *small, *rollout), "reward", rises=True, least=0.1),
    )


def ptf(*arguments: str) -> str:
    """Run a command as a user does; return what it printed. Raises SystemExit with its last lines if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    done = subprocess.run(
        [sys.executable, "-m", "ptf.cli", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit("\n".join([f"ptf {' '.join(arguments)}:", *(done.stdout + done.stderr).splitlines()[-8:]]))
    return done.stdout


def children_cpu_s() -> float:
    """Return the CPU seconds of all commands so far."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def held_out_cells(run: Path) -> list[str]:
    """Return the shares of held-out questions answered rightly, before and after a run, as its published manifest has
    them."""
    metrics = json.loads((run.parent / "published" / run.name / "manifest.json").read_text())["metrics"]
    return [f"{metrics[f'{whose}greedy_pass_rate/test']:.2f}" for whose in ("starting_model/", "")]


def row(family: str, work: Work) -> tuple[str, bool]:
    """Run a job to what it publishes; return its row of the table, and whether its metric got better by `work.least`.

    The row of GRPO has the largest difference of the engine's log-probs from the trainer's, too.
    """
    before = children_cpu_s()
    output = ROOT / "runs" / "family_runs" / family / work.name.lower()
    name = time.strftime("%H%M%S")
    # the first job stays where its config says, because the others look for it there
    sets = [f"--set={s}" for s in (*work.settings, *([] if work.name == "SFT" else [f"output={output}"]))]
    ptf("train", work.config, "--run-name", name, *sets)
    run = (ROOT / "runs" / "families" / family if work.name == "SFT" else output) / name
    ptf("evaluate", str(run))
    export = max(float(d) for d in re.findall(r"log-probs are within (\S+) of", ptf("publish", str(run))))
    rows = read_metrics(run / "metrics.jsonl")
    values = [r[work.metric] for r in rows if work.metric in r]
    window = max(1, min(WINDOW, len(values) // 5))
    first, last = (sum(part) / len(part) for part in (values[:window], values[-window:]))
    better = (last - first if work.rises else first - last) >= work.least
    engine = max((r["logprob_diff_max"] for r in rows if "logprob_diff_max" in r), default=None)
    cells = [
        family,
        work.name,
        str(len(rows)),
        work.metric,
        str(len(values)),
        f"{first:.3f}",
        f"{last:.3f}",
        *held_out_cells(run),
        f"{export:.1e}",
        "" if engine is None else f"{engine:.1e}",
        f"{children_cpu_s() - before:.0f}",
    ]
    print(f"{family} {work.name}: {work.metric} {first:.3f} → {last:.3f}; export within {export:.1e}", flush=True)
    return f"| {' | '.join(cells)} |", better


def main() -> int:
    """Run the jobs and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    families = parser.parse_args().families
    lines, missed = [], []
    for family in families:
        for work in works(family):
            line, better = row(family, work)
            lines.append(line)
            if not better:
                missed.append(f"{family} {work.name}")
    bars = ", ".join(f"{work.name} {work.least:g}" for work in works(FAMILIES[0]))
    about = (
        "# Families with linear or latent attention, end to end\n\n"
        f"Command: `python benchmarks/family_runs.py`  \nHardware: {cpu()}  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}\n\n"
        "Tiny models with random weights learn sums and differences of numbers up to 20 (`configs/families/`). LoRA,\n"
        f"DPO and GRPO go on from what SFT publishes: LoRA with numbers up to {LARGER}, DPO with pairs, GRPO with\n"
        "rollouts of the native engine.\n\n"
        f"First and last are means over {WINDOW} measurements, or a fifth of them. SFT and LoRA: the loss of the\n"
        "answers to questions whose operands are not in its data. DPO: the share of held-out pairs, of a right answer\n"
        "and one with a wrong digit, in which the right one has gained on the other since SFT. GRPO: the share of\n"
        f"right answers among those sampled, to {PROMPTS} training prompts that come up in every step. The command\n"
        f"fails if a job gains less than this: {bars}.\n\n"
        "*Right before* and *after*: the share of 75 held-out questions that the model answers rightly, greedily\n"
        f"(LoRA: of numbers up to {LARGER}; SFT's data had some of these questions). It is no bar: these runs show\n"
        "that a job learns what it is trained on, not that it generalises. GRPO sees its few prompts only, and what\n"
        "it learns of them may cost answers to others; `benchmarks/main_job.py` has a GRPO that\n"
        "gains on held-out questions.\n\n"
        "*Export*: transformers loaded what was published (LoRA: the merged model, and PEFT the adapter), and its\n"
        "log-probs differ from the trained model's by at most this; a version appears only after this check.\n"
        "*Engine*: the largest difference of a sampled token's log-prob between engine and trainer, over all steps.\n\n"
        "| family | job | steps | metric | measured | first | last | right before | after | export | engine | CPU s |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return write_page(RESULTS, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
