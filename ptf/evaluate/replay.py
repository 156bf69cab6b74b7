"""Replay: a finished run is trained once more and must end with the same bits.

A run with `rollout.clock: wall` is repeated from its `flight.jsonl`, which has what the wall clock decided. All other
runs repeat by themselves.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from ptf import storage
from ptf.compute.tracking import is_clock, read_metrics
from ptf.errors import UserError
from ptf.rl.flight_ledger import LEDGER_FILE
from ptf.run import JOB, check_run_name
from ptf.training_run import METRICS, Run, train


def replay(run: Run, name: str) -> bool:
    """Train a finished run again, as a run called `name`; print and return whether it ended with the same bits.

    Raises UserError if the run has not ended, or a run called `name` is not its
    replay. A replay that was interrupted goes on.
    """
    run.raise_if_unfinished()
    check_run_name(name)
    directory = run.directory.resolve().parent / name
    if directory == run.directory.resolve():
        raise UserError(f"--run-name {name}: a run cannot be replayed into its own directory")
    ledger, copy = run.directory / LEDGER_FILE, directory / LEDGER_FILE
    decided = ledger.read_bytes() if ledger.exists() else b""
    begun_already = (directory / JOB).exists()
    if begun_already and not (copy.read_bytes() if copy.exists() else b"").startswith(decided):
        raise UserError(f"{directory} is a run that does not replay this one; give another --run-name")
    if decided and not begun_already:
        storage.write_text(str(copy), decided.decode())
    again = train(run.job, name)
    differing = _different_tensors(run.model, again.model)
    steps = _first_different_step(run.directory / METRICS, again.directory / METRICS)
    same = f"{again.directory} has the bits of {run.directory}: its weights and the metrics of every step"
    found = [f"step {steps} is the first whose metrics differ"] if steps is not None else []
    found += [f"{len(differing)} tensors or files differ, {differing[0]} first"] if differing else []
    print("\n".join(found or [same]), flush=True)
    return not found


def _different_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors whose bits are not the same in two directories of a model, or the files that one
    of them lacks. Raises UserError if there are no weights."""
    files, others = ({path.name for path in directory.glob("*.safetensors")} for directory in (one, other))
    if not files:
        raise UserError(f"{one} has no weights (*.safetensors) to compare")
    found = sorted(files ^ others)
    for name in sorted(files & others):
        with safe_open(one / name, "pt") as a, safe_open(other / name, "pt") as b:
            both = set(a.keys()) & set(b.keys())
            found += sorted(set(a.keys()) ^ set(b.keys()))
            found += [key for key in sorted(both) if not _are_equal(a.get_tensor(key), b.get_tensor(key))]
    return found


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits, others = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(bits, others)


def _first_different_step(one: Path, other: Path) -> int | None:
    """Return the first step whose metrics differ, those apart that measure time or memory, or count retries; None if
    none does."""
    rows, others = read_metrics(one), read_metrics(other)
    for a, b in zip(rows, others, strict=False):
        # faults that passed do not come again
        names = {name for name in a.keys() | b.keys() if not is_clock(name)} - {"rewards_retried"}
        if any(repr(a.get(name)) != repr(b.get(name)) for name in names):
            return a["step"]
    return None if len(rows) == len(others) else min(len(rows), len(others)) + 1
