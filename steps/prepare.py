"""The prepare stage: make the data and the models of other jobs that the job's later stages read."""

from collections.abc import Sequence
from pathlib import Path

from ptf.config import Job, load, model_paths
from steps.artifact import Artifact


def prepare(job: Job, artifact: Artifact) -> Artifact:
    """Make the prepared data, or reuse them if they exist. Models of other jobs that are not published yet are trained
    and published first."""
    from ptf import storage
    from ptf.data.sources.rows import stamps
    from ptf.evaluate.evaluation_check import check_evaluation
    from ptf.run import (
        check_run_name,
        dataset_commits,
        prepared_directory,
        published_models,
        recorded_models,
        remove_leftovers,
        unpublished,
    )
    from ptf.storage import published_versions
    from ptf.train.source_specs import specs

    check_run_name(artifact.run_name)
    check_evaluation(job)  # checks for the last stages, before the first one runs
    published_versions.manifest(job.versions)  # raises if the published version cannot be read
    storage.require_bucket(job.versions)
    remove_leftovers(job, artifact.run_name)
    artifact = artifact.with_changes(prepared=prepared_directory(job))
    for _ in model_paths(job):  # repeated, because a job may need the model of a job before it
        if not (waiting := list(unpublished(job, published_models(job)).values())):
            break
        print(f"prepare: {waiting[0]} has published no model yet; running its stages first", flush=True)
        _run_stages(load(waiting[0]), f"{artifact.run_name}-{Path(waiting[0]).stem}")
    artifact = artifact.with_changes(
        models=published_models(job) | recorded_models(job, artifact.run_name),
        commits=dataset_commits(job, artifact.run_name),
    )
    return artifact.with_changes(data=stamps(specs(artifact.resolve(job).data.sources)))


def raise_if_unknown_run(run_name: str, directories: Sequence[Path]) -> None:
    """Raise UserError unless a run has begun in one of the directories (ptf.run.raise_if_unknown_run)."""
    from ptf.run import raise_if_unknown_run as refuse

    refuse(run_name, directories)


def _run_stages(job: Job, run_name: str) -> None:
    """Run all stages of another job."""
    from steps.evaluate import evaluate
    from steps.publish import publish
    from steps.tokenize import tokenize
    from steps.train import train

    artifact = Artifact(run_name=run_name)
    for stage in (prepare, tokenize, train, evaluate, publish):
        artifact = stage(job, artifact)
