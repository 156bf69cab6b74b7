"""How far runs of the same training end from each other when sequences are split into other passes, dealt to other
numbers of workers, or the number of workers changes on the way: in the fast mode, and with `train.deterministic`.
Writes results/determinism.md.

    python benchmarks/determinism.py [--steps 40]

Prints a JSON line a run. The reference of each mode is one worker with all sequences in one pass.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.tiny import arithmetic  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "determinism.md"
SEQUENCES = 8
CASES: dict[str, list[tuple[int, int]]] = {  # workers and sequences a pass, one attempt after the other
    "1 worker, 8 sequences a pass": [(1, 8)],
    "the same again": [(1, 8)],
    "1 worker, 4 sequences a pass": [(1, 4)],
    "1 worker, 1 sequence a pass": [(1, 1)],
    "2 workers": [(2, 4)],
    "4 workers": [(4, 2)],
    "1 → 2 → 4 → 1 workers": [(1, 8), (2, 4), (4, 2), (1, 8)],
}


def trained(raw: dict, name: str, attempts: list[tuple[int, int]], steps: int) -> Path:
    """A run whose attempts each make an equal part of the steps."""
    directory = Path()
    for number, (workers, micro_batch_sequences) in enumerate(attempts, 1):
        compute = {**raw["compute"], "workers": workers, "launcher": "torchrun" if workers > 1 else "local"}
        directory = run(
            loads(
                yaml.safe_dump(
                    {
                        **raw,
                        "train": {**raw["train"], "micro_batch_sequences": micro_batch_sequences},
                        "compute": compute,
                    }
                )
            ),
            name,
        )
        for saved in (directory / "checkpoints").iterdir():  # what a run would have that was stopped here
            if int(saved.name.removeprefix("step_")) > steps * number // len(attempts) and number < len(attempts):
                (saved / "manifest.json").unlink()
    return directory


def deviations(one: Path, other: Path) -> dict[str, float]:
    a, b = (read_metrics(run / "metrics.jsonl") for run in (one, other))
    x, y = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    apart = sum(float((x[k].double() - y[k].double()).square().sum()) for k in x) ** 0.5
    far = {
        name: max(abs(p[name] - q[name]) / abs(p[name]) for p, q in zip(a, b, strict=True))
        for name in ("loss", "grad_norm")
    }
    return {**far, "weights": apart / sum(float(v.double().square().sum()) for v in x.values()) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    lines = ""
    with tempfile.TemporaryDirectory() as scratch:
        raw = arithmetic(Path(scratch), rows=2000)
        raw["data"] |= {"validation": {}}
        raw["train"] |= {"steps": asked.steps, "global_batch_sequences": SEQUENCES, "validate_every": 0}
        raw["compute"] = {"threads": 1, "device": "cpu"}
        raw["checkpoint"] = {"every": asked.steps // 4, "keep": 9}
        for deterministic in (False, True):
            raw["train"]["deterministic"] = deterministic
            mode, reference = "train.deterministic" if deterministic else "fast", None
            for number, (case, attempts) in enumerate(CASES.items()):
                directory = trained(raw, f"{mode}-{number}", attempts, asked.steps)
                reference = reference or directory
                if directory != reference:
                    found = deviations(reference, directory)
                    print(json.dumps({"mode": mode, "case": case, **found}), flush=True)
                    lines += (
                        f"| {mode} | {case} | "
                        + " | ".join(f"{value:.1e}" if value else "0" for value in found.values())
                        + " |\n"
                    )
    RESULTS.write_text(
        "# How far equal runs end from each other\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/determinism.py', *sys.argv[1:]])}`  \n"
        f"Hardware: {cpu()}, torch {torch.__version__}, fp32, ranks of one thread, gloo  \nDate: "
        f"{time.strftime('%Y-%m-%d')}\n\n"
        f"The tests' tiny arithmetic model, {SEQUENCES} sequences a step, {asked.steps} steps, everything else equal; "
        "against one worker with all sequences in one\n"
        "pass, in the same mode. Loss and gradient norm: the largest relative difference of any step. Weights: "
        "the norm of the difference of all final\n"
        "weights, relative to their norm. 0 is bit for bit. More than one worker shard the model in the fast mode "
        "(FSDP2).\n\n"
        f"| mode | run | loss | gradient norm | weights |\n|---|---|---|---|---|\n{lines}"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
