"""Where a run's numbers go: metrics.jsonl, one aligned line on the console, and sinks (TensorBoard, Weights & Biases).

The one idea: a row belongs to a step, so resuming drops the rows of steps that will be made again, and the file reads as if the run had
never stopped. Fields that a clock or a memory gauge made are named in `is_clock`; all others repeat bit for bit.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ptf.compute.lease import UNSHARED, Lease
from ptf.config.schema import TrackConfig
from ptf.errors import UserError

CLOCKS = ("tok_s", "mfu", "mem_gib", "time")


def is_clock(name: str) -> bool:
    """True for fields that differ between two equal runs."""
    return name in CLOCKS or name.endswith("_s") or name.startswith(("seconds/", "mem/"))


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out. Raises UserError naming another that is not one of ours."""
    rows = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row["step"], int):
                raise ValueError
        except (ValueError, KeyError):  # of JSON, or of UTF-8
            if number == len(lines):
                break
            raise UserError(f"{path}:{number} is not a row of metrics: the file was damaged; restore it, or remove it to go on without it") from None
        rows.append(row)
    return rows


class Rows:
    """A file of JSON lines, each with its `step`; those of steps that will be made again are dropped when it is opened. `add` is durable when it returns.
    Both raise LeaseLost, and write nothing, where another process has taken the run over. `said`: what `state` was when the checkpoint was written that is
    resumed from; UserError where the rows are not those."""

    def __init__(self, path: Path, resumed: int, lease: Lease = UNSHARED, said: Mapping[str, Any] | None = None) -> None:
        self._lease, self._digest, self._count = lease, hashlib.sha256(), 0
        there = path.is_file()
        kept = [row for row in read_metrics(path) if row["step"] <= resumed]
        text = self._counted(kept)
        if said and self.state != said:
            if there:
                raise UserError(
                    f"{path} does not hold the {said['rows']} rows that were there at step {resumed}, as they were: the file was damaged; restore it, or "
                    "remove it to go on without it"
                )
            print(f"{path} is missing: its {said['rows']} rows up to step {resumed} are lost, and this run goes on without them", flush=True)
        temporary = path.with_suffix(".tmp")
        with lease.commit(local=True):
            temporary.write_text(text)
            os.replace(temporary, path)
            self.file = path.open("a")

    def add(self, *rows: Mapping[str, Any]) -> None:
        with self._lease.commit(local=True):
            self.file.write(self._counted(rows))
            self.file.flush()
            os.fsync(self.file.fileno())

    def _counted(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        self._digest.update(text.encode())
        self._count += len(rows)
        return text

    @property
    def state(self) -> dict[str, Any]:
        """Of the rows so far, for the manifest of a checkpoint: how many, and SHA-256."""
        return {"rows": self._count, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self.file.close()


class Sink(Protocol):
    """Where else a run's numbers go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, directory: Path, resumed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases, under the lineage's name: a run that resumes goes on in the same one."""

    def __init__(self, directory: Path, project: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError("track.wandb: the package wandb is not installed (pip install wandb)") from None
        self._run = wandb.init(project=project, id=directory.name, name=directory.name, dir=str(directory), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Written by one process. `log` is durable when it returns. `said`: see Rows."""

    def __init__(
        self, directory: Path, knobs: TrackConfig, *, resumed: int, steps: int, lease: Lease = UNSHARED, said: Mapping[str, Any] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self.rows = Rows(self.path, resumed, lease, said)
        self.steps, self.print_every = steps, knobs.print_every
        self.begun, self.resumed = time.perf_counter(), resumed
        self.sinks: list[Sink] = [TensorBoard(directory, resumed)] if knobs.tensorboard else []
        if knobs.wandb:
            self.sinks.append(WandB(directory, knobs.wandb))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of the step that made `step` in all."""
        self.rows.add({"step": step, **metrics, "time": time.time()})
        for sink in self.sinks:
            sink.log(step, metrics)
        if step % self.print_every == 0 or step in (self.resumed + 1, self.steps):
            print(self.line(step, metrics), flush=True)

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        rate = (time.perf_counter() - self.begun) / (step - self.resumed)
        left = int(rate * (self.steps - step))
        width = len(str(self.steps))
        shown = " ".join(f"{name} {value:<9.4g}" for name, value in metrics.items() if not name.startswith(("seconds/", "mem/", "units")))
        return f"step {step:>{width}}/{self.steps} {shown} left {left // 60}:{left % 60:02}"

    def close(self) -> None:
        self.rows.close()
        for sink in self.sinks:
            sink.close()
