"""The evaluate stage: measure the trained model on the job's held-out data (ptf.evaluate.evaluation)."""

from pathlib import Path

from ptf.config import Job
from steps.artifact import Artifact


def evaluate(job: Job, artifact: Artifact) -> Artifact:
    """Add the evaluation's metrics to the artifact. Raises the errors of `ptf.evaluate.evaluation.evaluate_run`."""
    from ptf.evaluate.evaluation import evaluate_run

    assert artifact.run is not None
    metrics = evaluate_run(artifact.resolve(job), Path(artifact.run))
    return artifact.with_changes(metrics={**artifact.metrics, **metrics})
