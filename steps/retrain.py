"""Retraining: training continues from the published version on new data, and the result is published only if it passes
the publish checks (`publish.gate`, `publish.max_regression`).

The manifest of a published version identifies the data that it was trained on. If the data are the same, or a training
from that version has already used them, there is nothing to do.
"""

from pathlib import Path
from typing import Any

from ptf import storage
from ptf.artifact import START, Artifact
from ptf.config import Job, fingerprint, loads
from ptf.errors import UserError
from ptf.storage import published_versions
from steps import stages

LAST = "retrained.json"  # beside the pointer: data, start, config and outcome of the last retraining


def starting_from_published(job: Job, artifact: Artifact) -> Job:
    """Return the job so that it starts from the version that its prepare stage found; unchanged if there was none."""
    return _on_published(job) if job.versions in artifact.models else job


def prepare(job: Job, artifact: Artifact) -> Artifact:
    """Prepare the job with the published model as its start, if there is one.

    Raises UserError if the config does not define when a model is better, or if it publishes only an adapter, from
    which training cannot start.
    """
    from ptf.run import read_job_file

    if job.publish.metric is None or job.publish.metric.startswith("train/"):
        raise UserError(
            "publish.metric: retraining compares with the published version; name a metric of the evaluate stage"
        )
    if not job.publish.measures_start:
        raise UserError(
            "publish.gate: retraining compares with the published version, which it starts from and must measure; "
            "use starting_model or off"
        )
    if job.publish.what == "adapter":
        raise UserError(
            "publish.what: retraining starts from the published version, so it must be a whole model; use merged or "
            "both"
        )
    if job.data.prepare:
        print(
            "retrain: data.prepare runs once for its arguments; changes of the data that it reads are not detected",
            flush=True,
        )
    # an earlier attempt at this run continues with the model that it started from
    begun = read_job_file(Path(job.output) / artifact.run_name)
    from_version = (
        loads(begun).model.path.startswith(f"{job.versions}/")
        if begun
        else published_versions.pointer(job.versions) is not None
    )
    return stages.prepare(_on_published(job) if from_version else job, artifact)


def has_new_data(job: Job, artifact: Artifact) -> bool:
    """Return whether there are data that neither the published version nor a training from it has used. Print the
    sources that changed, and why they count as used."""
    manifest = published_versions.manifest(job.versions)
    if manifest is None:
        print(
            f"retrain: nothing is published in {job.versions}; the first version is trained from {job.model.path}",
            flush=True,
        )
        return True
    then = manifest["data"]
    if then == artifact.data:
        print(f"retrain: nothing new since {manifest['version']}", flush=True)
        return False
    last = _last(job)
    changed = sorted(name for name in {*then, *artifact.data} if then.get(name) != artifact.data.get(name))
    since = f"retrain: {', '.join(changed)} changed since {manifest['version']}"
    # that training was not better, or its version was published and then withdrawn
    if _inputs(job, artifact, manifest["version"]).items() <= last.items():
        print(
            f"{since}, but {last['lineage']} has trained on these data already, and was {last['how']} (remove "
            f"{job.versions}/{LAST} to train on them again)",
            flush=True,
        )
        return False
    print(since, flush=True)
    return True


def publish(job: Job, artifact: Artifact) -> Artifact:
    """Publish the model unless it is worse than the one it was trained from by more than `publish.max_regression`, or,
    where that is 0, the same; record the outcome beside the pointer."""
    from ptf.evaluate.gate import Worse

    begun = artifact.models[job.versions].rsplit("/", 1)[-1] if job.model.path == job.versions else ""
    metric = str(job.publish.metric)
    before, now = artifact.metrics.get(START + metric), artifact.metrics.get(metric)
    try:
        if begun and now is not None and now == before and not job.publish.max_regression:
            raise Worse(f"not published: {metric} is {now:.4g} as before")
        artifact = stages.publish(job, artifact)
        how = f"published: {metric} {' → '.join(f'{value:.4g}' for value in (before, now) if value is not None)}"
    except Worse as worse:
        how = str(worse)
    print(f"retrain: {how}", flush=True)
    storage.write_record(
        f"{job.versions}/{LAST}", _inputs(job, artifact, begun) | {"lineage": artifact.run_name, "how": how}
    )
    return artifact


def outcome(job: Job) -> str:
    """Return what became of the last retraining: the model was published, or why it was not."""
    return str(_last(job)["how"])


def _on_published(job: Job) -> Job:
    model = job.model.model_copy(update={"path": job.versions, "init": "pretrained", "tokenizer": None, "tokens": None})
    return job.model_copy(update={"model": model})


def _inputs(job: Job, artifact: Artifact, version: str) -> dict[str, Any]:
    """Return the inputs that determine a retraining: its data, the version that it starts from, and its config."""
    return {"data": dict(artifact.data), "from": version, "config": fingerprint(_on_published(job))}


def _last(job: Job) -> dict[str, Any]:
    place = f"{job.versions}/{LAST}"
    if not storage.exists(place):
        return {}
    try:
        return storage.read_record(place, "")
    except (storage.Corrupt, IsADirectoryError, PermissionError):
        raise UserError(
            f"{place} cannot be read, so the data of the last retraining are unknown; remove it, "
            "and the data count as new"
        ) from None
