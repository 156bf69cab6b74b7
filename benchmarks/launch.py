"""What starting ranks through Ray costs a step: the same SFT job with `compute.launcher: ray` and `torchrun`, 2 workers of one thread, in turn.
Writes results/launch.md.

    python benchmarks/launch.py [--rounds 3] [--steps 60]

Prints a JSON line a run. The step is the median of `step_s` in the run's metrics, the first ten left out; start and end are counted apart.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.tiny import arithmetic  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "launch.md"
LAUNCHERS = ("torchrun", "ray")
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768}
WARM = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as scratch:
        raw = arithmetic(Path(scratch), rows=2000)
        config = Path(scratch) / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | SHAPE))
        raw["data"] |= {"seq_len": 512, "validation": {}}
        raw["train"] |= {"steps": asked.steps, "rows": 8, "micro_rows": 4, "validate_every": 0}
        raw["checkpoint"] = {"every": 10_000}
        for number in range(asked.rounds):
            for name in LAUNCHERS:
                job = {**raw, "compute": {"launcher": name, "workers": 2, "threads": 1, "device": "cpu"}}
                began = time.perf_counter()
                directory = run(loads(yaml.safe_dump(job)), f"{name}-{number}")
                steps = [row["step_s"] for row in read_metrics(directory / "metrics.jsonl")]
                found[name].append({"step_s": median(steps[WARM:]), "rest_s": time.perf_counter() - began - sum(steps)})
                print(json.dumps({"launcher": name, "round": number, **found[name][-1]}), flush=True)
    ratios = [a["step_s"] / b["step_s"] for a, b in zip(found["ray"], found["torchrun"], strict=True)]
    lines = "".join(
        f"| {name} | {median(r['step_s'] for r in rounds) * 1000:.1f} ({min(r['step_s'] for r in rounds) * 1000:.1f} – "
        f"{max(r['step_s'] for r in rounds) * 1000:.1f}) | {median(r['rest_s'] for r in rounds):.1f} |\n"
        for name, rounds in found.items()
    )
    RESULTS.write_text(
        "# The gang beside torchrun\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/launch.py', *sys.argv[1:]])}`  \nHardware: {cpu()}, 2 ranks of one thread, gloo  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"A Qwen3 shape of width 256 with 4 layers, 8 rows of 512 tokens a step, {asked.steps} steps, {asked.rounds} runs of each in turn.\n\n"
        f"| launcher | milliseconds a step, median of runs' medians (range) | seconds for start and end |\n|---|---|---|\n{lines}\n"
        f"A step through Ray takes **{median(ratios):.3f}** of torchrun's ({min(ratios):.3f} – {max(ratios):.3f}).\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
