"""Make what the job's other stages read: prepared data, and the model it starts from where that is another job's."""

from ptf.config import Job, load
from steps.artifact import Artifact


def prepare(job: Job, artifact: Artifact) -> Artifact:
    """Idempotent: what is there is reused. A start model that no one has published yet is trained and published first."""
    from ptf.run import begun, prepared_directory, published_start

    artifact = artifact.but(prepared=prepared_directory(job))
    if job.model.path.startswith("job:") and published_start(job) is None:
        config = job.model.path.removeprefix("job:")
        print(f"prepare: {config} has published no model yet; running its stages first", flush=True)
        _run_stages(load(config), f"{artifact.lineage}-start")
    return artifact.but(start=begun(job, artifact.lineage) or published_start(job))


def _run_stages(job: Job, lineage: str) -> None:
    from steps.evaluate import evaluate
    from steps.publish import publish
    from steps.tokenize import tokenize
    from steps.train import train

    artifact = Artifact(lineage=lineage)
    for stage in (prepare, tokenize, train, evaluate, publish):
        artifact = stage(job, artifact)
