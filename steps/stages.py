"""The stages of a job, in the order in which a flow runs them: prepare, tokenize, train, evaluate, publish."""

import os
from collections.abc import Sequence
from pathlib import Path

from ptf import storage
from ptf.artifact import Artifact
from ptf.config import Job, fingerprint, load, model_paths
from ptf.storage import published_versions


def prepare(job: Job, artifact: Artifact) -> Artifact:
    """Make the prepared data, or reuse them if they exist. Models of other jobs that are not published yet are trained
    and published first."""
    from ptf.data.sources.rows import specs, stamps
    from ptf.evaluate.gate import check_evaluation
    from ptf.run import check_run_name, inputs_of, published_models, remove_leftovers, unpublished

    check_run_name(artifact.run_name)
    check_evaluation(job)  # checks for the last stages, before the first one runs
    published_versions.manifest(job.versions)  # raises if the published version cannot be read
    storage.require_bucket(job.versions)
    remove_leftovers(job, artifact.run_name)
    for _ in model_paths(job):  # repeated, because a job may need the model of a job before it
        if not (waiting := list(unpublished(job, published_models(job)).values())):
            break
        print(f"prepare: {waiting[0]} has published no model yet; running its stages first", flush=True)
        _run_stages(load(waiting[0]), f"{artifact.run_name}-{Path(waiting[0]).stem}")
    artifact = inputs_of(job, artifact.run_name)
    return artifact.with_changes(data=stamps(specs(artifact.resolve(job).data.sources)))


def tokenize(job: Job, artifact: Artifact) -> Artifact:
    """Tokenize the sources and the validation sets of an offline recipe, to parquet, or reuse tokenized data that were
    made from the same files with the same tokenizer and settings.

    Does nothing for online recipes, which render prompts during training, and with `data.pretokenize: false`.
    """
    if job.rollout or not job.data.pretokenize:
        print("tokenize: nothing to do, because tokenization happens during training", flush=True)
        return artifact

    from ptf.train import tokenize as tokenizing
    from ptf.train.job_tokenizer import job_tokenizer

    resolved = artifact.resolve(job)
    tokenizer = job_tokenizer(resolved, Path(job.output) / artifact.run_name, job.verify_bytes)
    return artifact.with_changes(
        tokenized=tokenizing.tokenize(
            resolved, tokenizer, len(os.sched_getaffinity(0)), fingerprint(job, *tokenizing.SETTINGS)
        )
    )


def train(job: Job, artifact: Artifact) -> Artifact:
    """Train from the newest checkpoint of the artifact's run, or from the start. The metrics of the last step are
    added to the artifact as `train/…`."""
    from ptf.run import run
    from ptf.training_run import last_metrics, record_data

    directory = run(artifact.resolve(job), artifact.run_name)
    record_data(directory, artifact.data)
    return artifact.with_changes(run=str(directory), model=str(directory / "model"), metrics=last_metrics(directory))


def evaluate(job: Job, artifact: Artifact) -> Artifact:
    """Measure the trained model on the job's held-out data, and add the metrics to the artifact. Raises the errors of
    `ptf.evaluate.evaluation.evaluate_run`."""
    from ptf.evaluate.evaluation import evaluate_run

    assert artifact.run is not None
    return artifact.with_changes(
        metrics={**artifact.metrics, **evaluate_run(artifact.resolve(job), Path(artifact.run))}
    )


def publish(job: Job, artifact: Artifact) -> Artifact:
    """Make the publish checks, publish the artifact's model as a version under the name of its run, and add its address
    to the artifact. Raises the errors of `ptf.publish.publishing.publish`."""
    from ptf.publish.publishing import publish as publish_version

    return publish_version(job, artifact)


def page(artifact: Artifact) -> str:
    """Return Markdown for the card of the publish step: the publish checks that were passed, and the model card."""
    if artifact.published is None:
        return f"# {artifact.run_name}\n\n**Not published:** it is not better than the published version."
    text = storage.read_text(f"{artifact.published}/README.md").split("---\n", 2)[-1]
    manifest = storage.manifest_of(artifact.published)
    return (
        f"Publish checks passed: loaded again, its log-probs are within {manifest['logprob_difference']:.1e} of the "
        "trained model's; the tokenizer gives the ids that were trained on. "
        f"Compared with what training started from: {manifest['gate']}.\n\n{text}"
    )


def raise_if_unknown_run(run_name: str, directories: Sequence[Path]) -> None:
    """Raise UserError unless a run has begun in one of the directories (ptf.run.raise_if_unknown_run)."""
    from ptf.run import raise_if_unknown_run as refuse

    refuse(run_name, directories)


def _run_stages(job: Job, run_name: str) -> None:
    artifact = Artifact(run_name=run_name)
    for stage in (prepare, tokenize, train, evaluate, publish):
        artifact = stage(job, artifact)
