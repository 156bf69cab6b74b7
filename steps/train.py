"""Train: hand the job to its gang or its controller."""

from ptf.config import Job
from steps.artifact import Artifact


def train(job: Job, artifact: Artifact) -> Artifact:
    """Continues from the newest checkpoint of the artifact's lineage. The last step's numbers become `train/…` metrics."""
    from ptf.compute.tracking import read_metrics
    from ptf.run import run

    directory = run(artifact.resolve(job), artifact.lineage)
    last = read_metrics(directory / "metrics.jsonl")[-1]
    metrics = {f"train/{name}": value for name, value in last.items()}
    return artifact.but(run=str(directory), model=str(directory / "model"), metrics=metrics)
