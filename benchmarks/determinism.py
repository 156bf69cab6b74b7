"""How far runs of the same training end from each other when sequences are split into other passes, dealt to other
numbers of workers, or the number of workers changes on the way: in the fast mode, and with `train.deterministic`.
Writes results/determinism.md.

    python benchmarks/determinism.py [--steps 40]

Prints a JSON line a run. The reference of each mode is one worker with all sequences in one pass.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from commands import options
from flow_runs import results_page
from pages import head, table, write_page
from safetensors.torch import load_file

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.run import run
from tests.tiny import arithmetic

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


def trained(raw: dict[str, Any], name: str, attempts: list[tuple[int, int]], steps: int) -> Path:
    """A run whose attempts each make an equal part of the steps."""
    directory = Path()
    for number, (workers, micro_batch_sequences) in enumerate(attempts, 1):
        compute = {**raw["compute"], "workers": workers, "launcher": "torchrun" if workers > 1 else "local"}
        train = {**raw["train"], "micro_batch_sequences": micro_batch_sequences}
        directory = run(loads(yaml.safe_dump({**raw, "train": train, "compute": compute})), name)
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
    asked, rows = options(__doc__, steps=40), []
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
                    rows.append([mode, case, *(f"{value:.1e}" if value else "0" for value in found.values())])
    hardware = f", torch {torch.__version__}, fp32, ranks of one thread, gloo"
    about = f"""\
The tests' tiny arithmetic model, {SEQUENCES} sequences a step, {asked.steps} steps, everything else equal; against one
worker with all sequences in one pass, in the same mode. Loss and gradient norm: the largest relative difference of any
step. Weights: the norm of the difference of all final weights, relative to their norm. 0 is bit for bit. More than one
worker shard the model in the fast mode (FSDP2).

"""
    about = head("How far equal runs end from each other", hardware) + about
    lines = table("mode | run | loss | gradient norm | weights", rows)
    write_page(results_page("determinism.md"), about, [lines])


if __name__ == "__main__":
    main()
