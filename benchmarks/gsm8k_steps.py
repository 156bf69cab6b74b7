"""SFT, then GRPO, on the calculator steps of GSM8K: held-out accuracy with intervals. Needs the data (PTF_DATA).

python benchmarks/gsm8k_steps.py [--seeds 0 1]      # writes benchmarks/results/gsm8k_steps.md
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import options
from benchmarks.flow_runs import ROOT, flow, published, results_page
from benchmarks.pages import head, kept, table, write_page


def passes(run: Path, name: str) -> list[int]:
    """1 for each greedy answer that passed, in the order of the questions."""
    rows = kept(run / "responses" / f"{name}.jsonl")
    return [int(row["reward"] is not None and row["reward"] >= 1) for row in rows]


def wilson(p: float, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def paired(before: list[int], after: list[int]) -> tuple[float, float]:
    """Mean difference on the same questions and the half-width of its 95 % interval."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n, mean = len(differences), sum(differences) / len(differences)
    return mean, 1.959964 * math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)


def once(recipe: str, output: str, more: list[str]) -> float:
    """Run a flow unless it has published under `output`; its minutes."""
    spent = ROOT / output / "seconds"
    if not spent.exists():
        spent.parent.mkdir(parents=True, exist_ok=True)
        spent.write_text(f"{flow(recipe, f'configs/gsm8k/{recipe}.yaml', [f'output={output}', *more]):.1f}")
    return float(spent.read_text()) / 60


def main() -> None:
    rows = []
    for seed in options(__doc__, seeds=[0]).seeds:
        base = f"runs/gsm8k_steps/{seed}"
        at = [f"seed={seed}", "track.tensorboard=false"]
        minutes = [
            once("sft", f"{base}/sft", at),
            once("grpo", f"{base}/grpo", [f"model.path={base}/sft/published", *at]),
        ]
        sft, grpo = published(f"{base}/sft"), published(f"{base}/grpo")
        before, after = passes(ROOT / grpo["run"], "start_test"), passes(ROOT / grpo["run"], "test")
        gain, half = paired(before, after)
        for name, run, spent in (("SFT", sft, minutes[0]), ("GRPO", grpo, minutes[1])):
            p, n = run["metrics"]["greedy_pass_rate/test"], len(after)
            low, high = wilson(p, n)
            more = f"{100 * gain:+.1f} ± {100 * half:.1f}" if name == "GRPO" else ""
            shares = [f"{p:.3f} [{low:.3f}, {high:.3f}]", f"{run['metrics']['pass@8/test']:.3f}"]
            row = [seed, name, run["steps"], f"{spent:.1f}", n, *shares, more]
            rows.append(row)
            print(*row, flush=True)
    about = head("The calculator steps of GSM8K") + ABOUT
    names = "seed | run | steps | minutes | questions | greedy accuracy | pass@8 | GRPO over SFT, points"
    write_page(results_page("gsm8k_steps.md"), about, [table(names, rows)])


ABOUT = """\
`flows/sft_flow.py` and `flows/grpo_flow.py` with `configs/gsm8k/{sft,grpo}.yaml`. The 11,021 distinct steps
(`<<48/2=24>>`) of the training problems, 500 of their expressions kept for development, and 50,000 generated
expressions of the same shapes to imitate; GRPO answers the real ones. Tested greedily on every expression of the test
problems that no training problem has. Answers are compared as numbers. Brackets: 95 % Wilson intervals; the last
column: difference on the same questions with its 95 % interval.

"""


if __name__ == "__main__":
    main()
