"""The train stage: run the job's training (ptf.run)."""

from ptf.config import Job
from steps.artifact import Artifact


def train(job: Job, artifact: Artifact) -> Artifact:
    """Train from the newest checkpoint of the artifact's run, or from the start. The metrics of the last step are
    added to the artifact as `train/…`."""
    from ptf.run import run
    from ptf.training_run import last_metrics, record_data

    directory = run(artifact.resolve(job), artifact.run_name)
    record_data(directory, artifact.data)
    return artifact.with_changes(run=str(directory), model=str(directory / "model"), metrics=last_metrics(directory))
