"""A training run: made by `train`, and read from its directory as a value (its job, metrics and checkpoints)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ptf import storage
from ptf.artifact import Artifact
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.tracking import read_metrics
from ptf.config import Job, dump, loads, raise_if_fixed_keys_changed
from ptf.config.plugin import on_path
from ptf.data.sources.rows import specs, stamps
from ptf.errors import UserError
from ptf.evaluate.gate import unmeasured
from ptf.model.components import abbreviated
from ptf.run import JOB, new_run_name, read_job_file, resolved, run
from ptf.train.export import MODEL

METRICS, EVALUATED, DATA = "metrics.jsonl", "evaluated.json", "data.json"  # in the run's directory
EVALUATE = "ptf evaluate writes it anew"


@dataclass(frozen=True)
class Run:
    """One training run, as its directory holds it."""

    directory: Path
    """`{output}/{run_name}`: metrics.jsonl, checkpoints/, and, once training has ended, model/."""
    job: Job
    """The resolved job that was trained, with the overrides of changeable keys that `at` was given."""
    metrics: Mapping[str, float]
    """`train/…` of the last step; the evaluation's beside them, where the run was evaluated."""
    checkpoints: tuple[int, ...]
    """Steps of the complete checkpoints, in order."""

    @classmethod
    def at(cls, directory: str | Path, overrides: Sequence[str] = ()) -> "Run":
        """Read a run from its directory. `overrides` (`a.b=value`) change keys that are free to change after training,
        such as those of `evaluate` and `publish`. Raises UserError where the directory is not a run's or another key
        would change."""
        directory = Path(directory)
        text = read_job_file(directory) if directory.is_dir() else None
        if text is None:
            raise UserError(f"{directory} is not the directory of a training run: it has no {JOB}")
        on_path([directory / JOB])
        job = _overridden(text, overrides)
        if Path(job.output).resolve() != directory.resolve().parent:  # begun elsewhere, or moved since
            job = job.model_copy(update={"output": str(directory.resolve().parent)})
        metrics = last_metrics(directory) | _record(directory, EVALUATED, EVALUATE).get("metrics", {})
        return cls(directory, job, metrics, tuple(reversed(Checkpoints.of(job, directory).finished)))

    def updated(self, overrides: Sequence[str] = ()) -> "Run":
        """Read the metrics and checkpoints anew, and apply other values of changeable keys to this run's job."""
        return replace(Run.at(self.directory), job=_overridden(dump(self.job), overrides) if overrides else self.job)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.directory.resolve().name

    @property
    def model(self) -> Path:
        """The directory of the trained model in Hugging Face format; it is there once training has ended."""
        return self.directory / "model"

    def raise_if_unfinished(self) -> None:
        """Raise UserError where training has not ended."""
        if not self.model.is_dir():
            raise UserError(
                f"{self.directory} has no trained model yet: ptf train {self.directory / JOB} --run-name {self.name} "
                "trains it to its end"
            )

    @property
    def adapter(self) -> Path | None:
        """The directory of the adapter in PEFT format, or None where training wrote none."""
        adapter = self.directory / "adapter"
        return adapter if adapter.is_dir() else None

    def artifact(self) -> Artifact:
        """Return the names that the stages of a flow pass on. Raises UserError where training has not ended."""
        self.raise_if_unfinished()
        advice = "remove it: the card is then written without the stamps of the data"
        data = _record(self.directory, DATA, advice).get("data", {})
        return Artifact(self.name, run=str(self.directory), model=str(self.model), metrics=self.metrics, data=data)


def train(job: Job, run_name: str | None = None) -> Run:
    """Train a job from its config to the exported model, without an orchestrator. None starts a new run; one that
    exists goes on from its newest checkpoint."""
    if run_name is None:
        run_name = new_run_name(job)
    print(f"run name {run_name} (after a failure: the same command with --run-name {run_name})", flush=True)
    job = resolved(job, run_name)
    data = stamps(specs(job.data.sources))  # of the files that are about to be read
    directory = run(job, run_name)
    record_data(directory, data)
    print(f"trained: {directory / 'model'}   metrics: {directory / METRICS}", flush=True)
    return Run.at(directory)


def last_metrics(directory: Path) -> dict[str, float]:
    """Return the metrics of the last step as `train/…`; none before the first step."""
    rows = read_metrics(directory / METRICS)
    return {f"train/{name}": value for name, value in rows[-1].items()} if rows else {}


def record_evaluation(directory: Path, metrics: Mapping[str, float]) -> None:
    """Keep the metrics of an evaluation in the run's directory."""
    storage.write_record(
        str(directory / EVALUATED),
        {"lineage": directory.resolve().name, "metrics": dict(metrics), "model": _exported(directory)},
    )


def raise_if_not_evaluated(job: Job, directory: Path) -> None:
    """Raise UserError unless all that the gate may compare was measured on the run's exported model."""
    if not unmeasured(job, {}):
        return
    record, exported, fault = _record(directory, EVALUATED, EVALUATE), _exported(directory), ""
    if not record:
        fault = "the run was not evaluated"
    elif record.get("model") != exported:
        fault = "the evaluation was of an earlier model of this run"
    elif missing := unmeasured(job, record["metrics"]):
        fault = f"the evaluation did not measure {abbreviated(missing)}"
    if fault:
        raise UserError(
            f"not published: {fault}, so the gate has nothing to compare: run ptf evaluate {directory}, or set "
            "publish.gate: off"
        )


def _exported(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the exported model's weights, by file."""
    files = storage.manifest_of(str(directory / MODEL))["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def record_data(directory: Path, data: Mapping[str, str]) -> None:
    """Keep the stamps of the data files that the run was trained on, by source."""
    storage.write_record(str(directory / DATA), {"lineage": directory.resolve().name, "data": dict(data)})


def _record(directory: Path, name: str, advice: str) -> dict:
    if not (directory / name).exists():
        return {}
    return storage.read_record(str(directory / name), advice, {"lineage": directory.resolve().name})


def _overridden(text: str, overrides: Sequence[str]) -> Job:
    """Return the job of a text with changeable keys changed. Raises UserError for a key that may not change."""
    job = loads(text, overrides)
    raise_if_fixed_keys_changed(loads(text), job)
    return job
