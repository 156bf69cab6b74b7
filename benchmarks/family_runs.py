"""SFT, LoRA, DPO and GRPO (native engine) of tiny models of families with linear or latent attention, each from its
config to a published model. Writes results/family_runs.md.

    python benchmarks/family_runs.py [FAMILY ...]

What a run publishes is loaded by transformers before, and must give the trained model's log-probs. Exits 1 if a job
fails, or if what it trains on does not get better: the loss, DPO's accuracy, GRPO's reward.
"""

import argparse
import os
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
WINDOW = 15  # measurements over which a metric is averaged, or a third of them
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Work:
    """A job of the table: its configs, what is set in them, and the metric that must get better."""

    name: str
    config: str
    settings: tuple[str, ...]
    metric: str
    rises: bool


def works(family: str) -> tuple[Work, ...]:
    """Return the jobs of a family; those after the first go on from what the first publishes."""
    own = f"configs/families/{family}.yaml"
    start = f"model.path=job:{own}"
    small = (
        "compute.threads=1",
        "compute.launcher=local",
        "publish.gate=off",
        "evaluate.engine=native",
        "evaluate.limit=200",
    )
    adapter = (
        "model.init=pretrained",
        # of attention alone: PEFT has no format for adapters beside shared experts
        "model.lora={rank: 8, alpha: 16, targets: ['layers.*.attn.*_proj']}",
        "train.steps=150",
        "train.lr=1e-3",
        "publish.what=both",
    )
    rollout = ("rollout.engine=native", "rollout.prompts_per_step=32", "train.steps=80", "train.lr=3e-4")
    return (
        Work("SFT", own, (), "loss/dev", rises=False),
        Work("LoRA", own, (start, *small, *adapter), "loss/dev", rises=False),
        Work("DPO", "configs/tiny/dpo.yaml", (start, *small, "train.steps=60"), "accuracy", rises=True),
        Work("GRPO", "configs/tiny/grpo.yaml", (start, *small, *rollout), "reward", rises=True),
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


def row(family: str, work: Work) -> tuple[str, bool]:
    """Run a job to what it publishes; return its row of the table, and whether its metric got better."""
    output = ROOT / "runs" / "family_runs" / family / work.name.lower()
    name = time.strftime("%H%M%S")
    # the first job stays where its config says, because the others look for it there
    sets = [f"--set={s}" for s in (*work.settings, *([] if work.name == "SFT" else [f"output={output}"]))]
    ptf("train", work.config, "--run-name", name, *sets)
    run = (ROOT / "runs" / "families" / family if work.name == "SFT" else output) / name
    ptf("evaluate", str(run))
    published = ptf("publish", str(run)).strip().splitlines()[-1]
    values = [r[work.metric] for r in read_metrics(run / "metrics.jsonl") if work.metric in r]
    window = max(1, min(WINDOW, len(values) // 3))
    first, last = (sum(part) / len(part) for part in (values[:window], values[-window:]))
    better = last > first if work.rises else last < first
    print(f"{family} {work.name}: {work.metric} {first:.3f} → {last:.3f}; {published}", flush=True)
    return f"| {family} | {work.name} | {len(values)} | {work.metric} | {first:.3f} | {last:.3f} | yes |", better


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
    about = (
        "# Families with linear or latent attention, end to end\n\n"
        f"Command: `python benchmarks/family_runs.py`  \nHardware: {cpu()}  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}\n\n"
        "Tiny models with random weights learn sums and differences (`configs/families/`); LoRA, DPO and GRPO go on\n"
        "from what SFT publishes. GRPO generates with the native engine. *Published*: transformers loaded the export\n"
        "(LoRA: the merged model, and PEFT the adapter) and gave the trained model's log-probs, before the version\n"
        f"appeared. First and last are means over {WINDOW} measurements, or\n"
        "a third of them.\n\n"
        "| family | job | steps logged | metric | first | last | published |\n|---|---|---|---|---|---|---|\n"
    )
    return write_page(RESULTS, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
