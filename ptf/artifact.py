"""What passes from stage to stage: paths, versions and metrics of what was made, small enough for any orchestrator to
store."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ptf.config import Job, resolve

START = "starting_model/"  # begins the names of the metrics of the model that training started from


def evaluated(metrics: Mapping[str, float]) -> dict[str, tuple[float | None, float]]:
    """Return the metrics of the evaluate stage by name: of the model that training started from, and of the trained
    one."""
    names = sorted(name for name in metrics if not name.startswith((START, "train/")))
    return {name: (metrics.get(START + name), metrics[name]) for name in names}


def figure(value: float | None) -> str:
    """Return the value of a metric as text; nothing where it was not measured."""
    return "" if value is None else f"{value:.4g}"


@dataclass(frozen=True)
class Artifact:
    """The names of what the stages of one training run have made so far."""

    run_name: str  # every resume of the training run keeps it
    prepared: str | None = None  # directory that data.prepare wrote
    # path → published version, of models that are `job:`s or directories of versions
    models: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)  # key of a source → its path at a commit of the Hub
    # source → stamp of its files when they were prepared (ptf.data.sources.rows.stamps)
    data: Mapping[str, str] = field(default_factory=dict)
    tokenized: Mapping[str, str] = field(default_factory=dict)  # source → directory of tokenized parquet
    run: str | None = None  # directory of the training run: metrics, checkpoints, model
    model: str | None = None  # Hugging Face directory that training exported
    metrics: Mapping[str, float] = field(default_factory=dict)  # of training and evaluation: `train/loss`, `loss/NAME`
    published: str | None = None  # URI of the published version

    def resolve(self, job: Job) -> Job:
        """Return the job with its `prepare:` and `job:` paths, and its tokenized sources, in place. Raises Corrupt
        where prepared data are not what was written."""
        if self.prepared is not None:
            from ptf.data.prepare import raise_if_damaged

            raise_if_damaged(self.prepared, job.verify_bytes)
        return resolve(
            job, prepared=self.prepared, models=self.models, tokenized=self.tokenized, datasets=self.datasets
        )

    def with_changes(self, **changes: Any) -> "Artifact":
        """Return a copy with these fields changed."""
        return replace(self, **changes)
