"""Make what the job's other stages read: prepared data, and the models it takes from other jobs."""

from ptf.config import Job, load
from steps.artifact import Artifact


def prepare(job: Job, artifact: Artifact) -> Artifact:
    """Idempotent: what is there is reused. Models of other jobs that no one has published yet are trained and published first."""
    from ptf.run import begun, prepared_directory, published_models, unpublished

    artifact = artifact.but(prepared=prepared_directory(job))
    for config in dict.fromkeys(unpublished(job, published_models(job)).values()):
        print(f"prepare: {config} has published no model yet; running its stages first", flush=True)
        _run_stages(load(config), f"{artifact.lineage}-start")
    return artifact.but(models=published_models(job) | begun(job, artifact.lineage))


def _run_stages(job: Job, lineage: str) -> None:
    from steps.evaluate import evaluate
    from steps.publish import publish
    from steps.tokenize import tokenize
    from steps.train import train

    artifact = Artifact(lineage=lineage)
    for stage in (prepare, tokenize, train, evaluate, publish):
        artifact = stage(job, artifact)
