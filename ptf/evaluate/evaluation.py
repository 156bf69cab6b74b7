"""The evaluate stage: measure a run, or any model, with what a job holds out, and report it.

`ptf.evaluate.measurement` computes the metrics. This module holds the run's lease, because one process at a time works
in a run, retries, prints a table, and records the metrics in the run's directory, where publishing reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ptf.artifact import START
from ptf.compute.device_defaults import settled
from ptf.compute.lease import hold_lease
from ptf.config import Job
from ptf.errors import Retryable, UserError, full_text, is_transient
from ptf.evaluate import gate
from ptf.evaluate.measurement import measure_model, measure_run
from ptf.model import model_files
from ptf.run import begun_job
from ptf.storage import published_versions
from ptf.training_run import record_evaluation
from ptf.workspace import disk, progress, scratch
from ptf.workspace.credentials import redacted

TRIES = 3


def evaluate_run(job: Job, run: Path) -> dict[str, float]:
    """Measure the trained model of a resolved job's run, print a table, and record the metrics in the run.

    The columns are the model that training started from, the trained model, and the published version. The evaluation
    is repeated if a process was lost, Ray did not start or a port was taken. Raises RunInUse if another process
    works in the run.
    """
    job, there = settled(job, begun_job(run)), published_versions.manifest(job.versions)
    with disk.disk_errors_as_user_errors(job.output), hold_lease(job, run) as lease, progress.stage("evaluate"):
        metrics = retry(lambda: measure_run(job, run))
        with lease.commit():
            record_evaluation(run, metrics)
    start = {name.removeprefix(START): value for name, value in metrics.items() if name.startswith(START)}
    columns = {"start": start, "trained": metrics} | ({"published": there["metrics"]} if there else {})
    print_table(columns, [name for name in metrics if not name.startswith(START)])
    print(f"gate: {gate.describe(job, gate.comparisons(job, run, metrics))}", flush=True)
    return metrics


def evaluate_model(job: Job, model: str) -> dict[str, float]:
    """Measure a model with what the job holds out, and print a table; nothing is recorded.

    `model`: a directory, a directory of versions, a URI or a Hugging Face id. Raises UserError if the job measures
    nothing, or if the model is an adapter.
    """
    job = settled(job)
    section = job.model.model_copy(
        update={"path": model, "init": "pretrained", "tokenizer": None, "tokens": None}
        | {"lora": None, "trainable": None}
    )
    publish = job.publish.model_copy(update={"gate": "unmeasured", "guards": {}})
    job = job.model_copy(update={"model": section, "publish": publish})
    gate.check_evaluation(job)
    directory = model_files.locate(model, verify_up_to=job.verify_bytes)
    with disk.disk_errors_as_user_errors(job.output), scratch.directory(Path(job.output) / "evaluation") as place:
        (place / "model").symlink_to(directory.resolve())
        with progress.stage("evaluate"):
            metrics = retry(lambda: measure_model(job, place))
    if not metrics:
        raise UserError("the job measures nothing: it has no evaluate.sources with a reward, and no data.validation")
    print_table({"measured": metrics}, list(metrics))
    return metrics


def print_table(columns: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> None:
    """Print a line for each of these metrics, and a column for each model that was measured."""
    if not names:
        return
    print(f"{'evaluation':<28}" + "".join(f" {title:>9}" for title in columns))
    for name in names:
        cells = [f"{column[name]:.4f}" if column.get(name) is not None else "" for column in columns.values()]
        print(f"{name:<28}" + "".join(f" {cell:>9}" for cell in cells), flush=True)


def retry(act: Callable[[], dict[str, float]], attempt: int = 1) -> dict[str, float]:
    """Return what `act` returns, after up to `TRIES` attempts, of which this one has the number `attempt`.

    An error that another attempt may not meet is raised as Retryable after the last attempt; any other at once.
    """
    try:
        return act()
    except Exception as error:
        if not is_transient(error):
            raise
        if attempt == TRIES:
            raise Retryable(
                f"the evaluation failed {TRIES} times; the last error was: {redacted(str(error))}"
            ) from error
        message = str(error) if isinstance(error, Retryable) else full_text(error)
        print(f"{redacted(message)}\nthe evaluation is tried again ({attempt} of {TRIES - 1})", flush=True)
    return retry(act, attempt + 1)
