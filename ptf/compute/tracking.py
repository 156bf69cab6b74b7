"""A run's metrics: metrics.jsonl, one aligned line on the console, and sinks (TensorBoard, Weights & Biases).

A row belongs to a step, so a resume drops the rows of steps that will be repeated, and the file is the same as if the
run had never stopped. `is_clock` identifies fields that measure time or memory; all others repeat bit for bit.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.compute.lease import UNSHARED, Lease
from ptf.config.sections.track import TrackConfig
from ptf.errors import UserError
from ptf.workspace import progress
from ptf.workspace.json_lines import json_lines

CLOCKS = ("tokens_per_s", "step_tokens_per_s", "mfu", "peak_memory_gib", "time", "update_slices_suggested")


def is_clock(name: str) -> bool:
    """Return whether a field measures time or memory, so that it differs between two equal runs."""
    return name in CLOCKS or name.endswith("_s") or name.startswith(("seconds/", "peak_memory_gib/"))


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl, as `json_lines` does; a row has the number of its step."""
    return json_lines(path, number="step")


class StepLines:
    """A file of JSON lines, each with its `step`; opening it drops the rows of steps that will be repeated.

    `add` is durable when it returns. Opening and `add` raise LeaseLost, and write nothing, if a different process has
    taken over the run. `expected` is the value of `state` in the checkpoint that the run resumes from; opening raises
    UserError if the rows do not match it.
    """

    def __init__(
        self, path: Path, resumed: int, lease: Lease = UNSHARED, expected: Mapping[str, Any] | None = None
    ) -> None:
        self._lease, self._digest = lease, hashlib.sha256()
        self.state: dict[str, Any] = {"rows": 0}  # and their SHA-256, for the manifest of a checkpoint
        text = self._encode([row for row in read_metrics(path) if row["step"] <= resumed])
        if expected and self.state != expected:
            if path.is_file():
                raise UserError(
                    f"{path} no longer has the {expected['rows']} rows that it had at step {resumed}: the file was "
                    "damaged; restore it, or remove it to continue without it"
                )
            print(
                f"{path} is missing: its {expected['rows']} rows up to step {resumed} are lost, "
                "and this run continues without them",
                flush=True,
            )
        temporary = path.with_suffix(".tmp")
        with lease.commit(local=True):
            temporary.write_text(text)
            os.replace(temporary, path)
            self.file = path.open("a")

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Append rows and flush them to disk."""
        with self._lease.commit(local=True):
            self.file.write(self._encode(rows))
            self.file.flush()
            os.fsync(self.file.fileno())

    def _encode(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the rows as lines, and add them to `state`."""
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        self._digest.update(text.encode())
        self.state = {"rows": self.state["rows"] + len(rows), "sha256": self._digest.hexdigest()}
        return text


# what writes the metrics of a step, and what ends it
Sink = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def tensorboard(directory: Path, resumed: int) -> Sink:
    """Return a sink of event files for TensorBoard, in the run's directory."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed + 1)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def raise_if_no_login() -> None:
    """Raise UserError if wandb, which `track.wandb_project` needs, is not installed, or has no login for an online
    run."""
    try:
        import wandb
    except ImportError:
        raise UserError("track.wandb_project: the package wandb is not installed (pip install wandb)") from None
    try:
        may_log = wandb.setup().settings.mode not in ("online", "shared") or wandb.login(prompt=False)
    except wandb.Error as error:  # the key is wrong, or the server cannot be reached
        raise UserError(f"track.wandb_project: {error}; or set WANDB_MODE=offline") from error
    if not may_log:
        raise UserError(
            "track.wandb_project: there is no login to Weights & Biases here: run `wandb login`, set WANDB_API_KEY, or "
            "set WANDB_MODE=offline"
        )


def weights_and_biases(directory: Path, project: str) -> Sink:
    """Return a sink of Weights & Biases; the run's id is kept in the run's directory, so that a resume continues it.

    The id is made of the run's name and its place, because a project may have runs of one name from several outputs.
    Raises UserError if wandb is not installed, or not logged in.
    """
    raise_if_no_login()
    import wandb

    file, name = directory / "wandb_id", directory.name
    if not file.is_file():
        place = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:8]
        file.write_text(f"{name[:100]}-{place}")
    run = wandb.init(project=project, id=file.read_text(), name=name, dir=str(directory), resume="allow")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return log, run.finish


class Tracker:
    """A run's metrics, written by one process. `log` is durable when it returns. For `expected`, see StepLines."""

    def __init__(
        self,
        directory: Path,
        track_config: TrackConfig,
        *,
        resumed: int,
        steps: int,
        lease: Lease = UNSHARED,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.lines = StepLines(directory / "metrics.jsonl", resumed, lease, expected)
        self.steps, self.print_every = steps, track_config.print_every
        self._stack = contextlib.ExitStack()
        self.progress = self._stack.enter_context(progress.phase("steps", steps, "steps", resumed))
        self.begun, self.resumed = time.perf_counter(), resumed
        self.sinks = [tensorboard(directory, resumed)] if track_config.tensorboard else []
        if track_config.wandb_project:
            self.sinks.append(weights_and_biases(directory, track_config.wandb_project))
        for close in (self.lines.file.close, *(close for _, close in self.sinks)):
            self._stack.callback(close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, online of a rollout and its optimizer steps; `step` counts from 1."""
        self.lines.add({"step": step, **metrics, "time": time.time()})
        self.progress.done, self.progress.total = step, self.steps
        for log, _ in self.sinks:
            log(step, metrics)
        if step % self.print_every == 0 or step in (self.resumed + 1, self.steps):
            rate = (time.perf_counter() - self.begun) / (step - self.resumed)
            left, width = int(rate * (self.steps - step)), len(str(self.steps))
            shown = " ".join(
                f"{name} {value:<9.4g}"
                for name, value in metrics.items()
                if not name.startswith(("seconds/", "peak_memory_gib/", "loss_denominator"))
            )
            print(f"step {step:>{width}}/{self.steps} {shown} left {left // 60}:{left % 60:02}", flush=True)
            progress.said()

    def close(self) -> None:
        """Close the file and the sinks."""
        self._stack.close()
