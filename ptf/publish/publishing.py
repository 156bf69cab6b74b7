"""The publish stage: make the publish checks, then publish the model as a version. The version's files are written
first, then its manifest, and last the pointer; no published file is ever moved."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf import storage
from ptf.artifact import START, Artifact
from ptf.compute import provenance
from ptf.compute.device_defaults import settled
from ptf.compute.lease import Lease, hold_lease
from ptf.config import Job, dump, fingerprint, shown
from ptf.errors import Retryable, UserError
from ptf.evaluate import gate
from ptf.publish.export_comparison import adapter_difference, model_difference
from ptf.publish.model_card import card
from ptf.run import begun_job
from ptf.storage import file_verification, published_versions
from ptf.train.export import raise_if_damaged
from ptf.training_run import raise_if_not_evaluated
from ptf.workspace import disk, progress

ATTEMPTS = 10
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", storage.MANIFEST)


def versions_of(job: Job) -> str:
    """Return where a job's published versions are. Raises UserError if it has published none."""
    if published_versions.pointer(job.versions) is None:
        raise UserError(
            f"nothing is published in {job.versions}: run the job's flow, or publish a run of it (ptf publish RUN)"
        )
    return job.versions


def publish(job: Job, artifact: Artifact) -> Artifact:
    """Publish the run's model as a version, and return the artifact with the version's address.

    The version is named after the run, so publishing again changes nothing. Raises, before anything is written,
    UserError if the exported model does not give the trained model's log-probs or its tokenizer gives different ids;
    Worse if the model is worse than the one that training started from or than the published one; RunInUse if a
    different process is writing to the run.
    """
    assert artifact.run is not None
    run = Path(artifact.run)
    job = settled(job, begun_job(run))
    with disk.disk_errors_as_user_errors(job.output), hold_lease(job, run) as lease, progress.stage("publish"):
        return _publish(job, run, artifact, lease)


def _publish(job: Job, run: Path, artifact: Artifact, lease: Lease) -> Artifact:
    assert artifact.model is not None
    root, resolved = job.versions, artifact.resolve(job)
    raise_if_damaged(run, job.verify_bytes)
    if job.publish.gate != "off":
        raise_if_not_evaluated(job, run)
    comparisons = gate.comparisons(job, run, artifact.metrics)
    gate.raise_if_worse(job, comparisons)
    _raise_if_worse(job, artifact, published_versions.manifest(root))
    difference = _loaded_difference(resolved, run, Path(artifact.model))
    staged, alone = run / "publish", job.publish.what == "adapter"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(artifact.model, staged, ignore=shutil.ignore_patterns(*WEIGHTS) if alone else None)
    if job.publish.what != "merged":
        shutil.copytree(run / "adapter", staged if alone else staged / "adapter", dirs_exist_ok=True)
    verdict, made_with = gate.describe(job, comparisons), provenance.read(run)
    # the version that the pointer named before this one
    seen = published_versions.pointer(root)
    counted = [*seen.before, seen.version] if seen else []
    earlier = counted[: counted.index(artifact.run_name)] if artifact.run_name in counted else counted
    before = storage.manifest_of(f"{root}/{earlier[-1]}") if earlier else None
    (staged / "README.md").write_text(card(job, artifact, made_with, before, verdict))
    manifest = {
        "version": artifact.run_name,
        "job": dump(shown(resolved)),
        "config": fingerprint(job),
        "metrics": dict(artifact.metrics),
        "logprob_difference": difference,
        "data": dict(artifact.data),
        "made_with": made_with,
        "gate": verdict,
        "what": job.publish.what,
    }
    files = storage.commit(str(staged), manifest)["files"]
    # after a retry the version may exist already: its files are not written again, since somebody may be reading them
    is_there = False
    with contextlib.suppress(storage.Missing, storage.Corrupt):
        is_there = file_verification.verify(f"{root}/{artifact.run_name}")["files"] == files
    lease.check()
    if not is_there:
        storage.upload(staged, f"{root}/{artifact.run_name}")
    _move_pointer(job, artifact, lease, is_there)
    print(
        f"published {root}/{artifact.run_name} (loaded again, its log-probs are within {difference:.1e} of the trained "
        "model's)",
        flush=True,
    )
    print(f"gate: {verdict}", flush=True)
    if job.publish.hub:
        push(staged, job.publish.hub, artifact.run_name)
    shutil.rmtree(staged)
    return artifact.with_changes(published=f"{root}/{artifact.run_name}")


def _loaded_difference(job: Job, run: Path, model: Path) -> float:
    """Return the largest difference of a log-prob over everything that is published: model, adapter or both.

    Raises UserError if a difference is too large, or if there is no adapter to publish.
    """
    difference = model_difference(job, run, model)
    if job.publish.what == "merged":
        return difference
    if not (run / "adapter").is_dir():
        raise UserError(
            f"publish.what: training wrote no adapter in {run}; the console output of training gives the reason; "
            "publish.what: merged publishes the merged model"
        )
    return max(difference, adapter_difference(job, run, run / "adapter"))


def _move_pointer(job: Job, artifact: Artifact, lease: Lease, is_there: bool) -> None:
    """Set the pointer to the new version.

    If the version was published before and a later one after it, the pointer stays at the later one. Raises Retryable
    if other processes keep moving the pointer.
    """
    root = job.versions
    for _ in range(ATTEMPTS):
        seen = published_versions.pointer(root)
        if is_there and seen and artifact.run_name in seen.before:
            print(
                f"{root}/{artifact.run_name} was published before, and {seen.version} after it; the pointer stays",
                flush=True,
            )
            return
        _raise_if_worse(job, artifact, published_versions.manifest(root))  # again: others may have published meanwhile
        with lease.commit():
            if published_versions.point(root, artifact.run_name, seen):
                return
    raise Retryable(
        f"all files of {root}/{artifact.run_name} are written, but the pointer could not be set to it: other processes "
        "keep publishing there"
    )


def push(directory: Path, repository: str, version: str) -> None:
    """Commit the version's files to a repository on the Hub.

    Raises UserError if the Hub does not accept them. The version is published by then; publishing again pushes again.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=version, delete_patterns="*"
        )
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise UserError(
            f"{version} is published, but not on the hub: {repository}: {type(error).__name__}: {error}\n"
            "Check that HF_TOKEN is set and may write there; a resume tries again."
        ) from error
    print(f"pushed to {commit.commit_url}", flush=True)


def _raise_if_worse(job: Job, artifact: Artifact, manifest: Mapping[str, Any] | None) -> None:
    """Raise UserError if `publish.metric` was not measured, and Worse if it is worse than that of the published version
    by more than `publish.max_regression`.

    If training started from the published version, its metric is the `starting_model/` one of this evaluation, which
    was measured on the same held-out data as the new model's.
    """
    section, metrics = job.publish, artifact.metrics
    if not section.metric:
        return
    if section.metric not in metrics:
        there = ", ".join(sorted(metrics)) or "nothing"
        raise UserError(f"publish.metric: the evaluation has no {section.metric!r}; it has {there}")
    now, before = metrics[section.metric], manifest["metrics"].get(section.metric) if manifest else None
    if manifest and artifact.models.get(job.model.path, job.model.path) == f"{job.versions}/{manifest['version']}":
        before = metrics.get(START + section.metric, before)
    if before is not None and not (now - before) * (-1 if section.less_is_better else 1) >= -section.max_regression:
        raise gate.Worse(
            f"not published: {section.metric} is {now:.4g}, the published version has {before:.4g}; allowed "
            f"regression: {section.max_regression:g} (publish.max_regression)"
        )
