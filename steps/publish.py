"""Publish: pass the gate, then make a version appear: its files, its manifest, and last the pointer. Nothing is ever moved."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptf.config import Job, dump, fingerprint, shown
from ptf.config.schema import LOGPROB_BOUND
from ptf.errors import Retryable, UserError
from steps.artifact import Artifact
from steps.model_card import card

if TYPE_CHECKING:
    from ptf.compute.lease import Lease

ATTEMPTS = 10


def publish(job: Job, artifact: Artifact) -> Artifact:
    """The version is named by the lineage, so publishing again changes nothing. Raises UserError, before anything is written, if the
    exported model does not give the trained model's log-probs in transformers or its tokenizer gives other ids; Worse, if it is worse than what training
    started from or what is published; Held where another process is writing the lineage."""
    from ptf.compute.lease import leased

    assert artifact.run is not None
    with leased(job, Path(artifact.run)) as lease:
        return _publish(job, artifact, lease)


def _publish(job: Job, artifact: Artifact, lease: "Lease") -> Artifact:
    from ptf import gate as gates
    from ptf import published, storage
    from ptf.compute import provenance
    from ptf.train.export import refuse_damaged

    assert artifact.run is not None
    assert artifact.model is not None
    resolved = artifact.resolve(job)
    root = job.versions
    refuse_damaged(Path(artifact.run), job.verify_bytes)
    compared = gates.comparisons(job, Path(artifact.run), artifact.metrics)
    gates.refuse_worse(job, compared)
    _refuse_worse(job, artifact, published.manifest(root))
    difference = gate(resolved, Path(artifact.run), Path(artifact.model))
    staged = Path(artifact.run) / "publish"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(artifact.model, staged)
    made = provenance.read(Path(artifact.run))
    (staged / "README.md").write_text(card(job, artifact, made, _before(root, artifact.lineage), gates.said(job, compared)))
    manifest = {
        "version": artifact.lineage, "job": dump(shown(resolved)), "config": fingerprint(job), "metrics": dict(artifact.metrics),
        "logprob_difference": difference, "data": dict(artifact.data), "made_with": made, "gate": gates.said(job, compared),
    }  # fmt: skip
    files = storage.commit(str(staged), manifest)["files"]
    again = _files(f"{root}/{artifact.lineage}") == files  # as after a retry: what may be being read is not written once more
    lease.check()
    if not again:
        storage.upload(staged, f"{root}/{artifact.lineage}")
    for _ in range(ATTEMPTS):
        seen = published.pointer(root)
        if again and seen and artifact.lineage in seen.before:
            print(f"{root}/{artifact.lineage} was published before, and {seen.version} after it; the pointer stays there", flush=True)
            break
        _refuse_worse(job, artifact, published.manifest(root))  # than what is there now: others may publish meanwhile
        with lease.commit():
            moved = published.point(root, artifact.lineage, seen)
        if moved:
            break
    else:
        raise Retryable(f"{root}/{artifact.lineage} is there whole, but others publish there all the time: its pointer could not be moved")
    print(f"published {root}/{artifact.lineage} (log-probs in transformers within {difference:.1e} of the trained model's)", flush=True)
    print(f"gate: {gates.said(job, compared)}", flush=True)
    if job.publish.hub:
        push(staged, job.publish.hub, artifact.lineage)
    shutil.rmtree(staged)
    return artifact.but(published=f"{root}/{artifact.lineage}")


def page(artifact: Artifact) -> str:
    """For whoever looks at the step: the gates that were passed, and the model card."""
    from ptf import storage

    if artifact.published is None:
        return f"# {artifact.lineage}\n\n**Not published:** what is there is better."
    said = storage.read_text(f"{artifact.published}/README.md").split("---\n", 2)[-1]
    manifest = storage.manifest_of(artifact.published)
    return (
        f"Gates passed: transformers gives the trained model's log-probs to {manifest['logprob_difference']:.1e}; the tokenizer gives the ids that were "
        f"trained on. Beside what training started from: {manifest.get('gate', 'not compared')}.\n\n{said}"
    )


def push(directory: Path, repository: str, version: str) -> None:
    """The version's files as a commit of a repository of the hub. Raises UserError where the hub does not take them: the version is published by then, and
    publishing again pushes again."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        found = api.upload_folder(repo_id=repository, folder_path=directory, commit_message=version, delete_patterns="*")
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise UserError(
            f"{version} is published, but not on the hub: {repository}: {type(error).__name__}: {error}\n"
            "Is HF_TOKEN set, and may it write there? A resume tries again."
        ) from error
    print(f"pushed to {found.commit_url}", flush=True)


def _before(root: str, lineage: str) -> Mapping[str, Any] | None:
    """The manifest of the version that counted before this one."""
    from ptf import published, storage

    seen = published.pointer(root)
    counted = [*seen.before, seen.version] if seen else []
    earlier = counted[: counted.index(lineage)] if lineage in counted else counted
    return storage.manifest_of(f"{root}/{earlier[-1]}") if earlier else None


def _files(version: str) -> Mapping[str, Any] | None:
    """What its manifest says of its files, where it is there whole."""
    from ptf import storage

    try:
        return storage.verify(version)["files"]
    except (storage.Missing, storage.Corrupt):
        return None


def gate(job: Job, run: Path, model: Path) -> float:
    """Load the export as its users will. Returns the largest log-prob difference; raises UserError if it is too large."""
    import torch

    from ptf.data.added import tokenizer_of
    from ptf.data.tokenizer import Tokenizer
    from ptf.model.bridge import export_dtype, locate
    from ptf.model.components import FILES
    from ptf.model.verify import export_difference, head_difference
    from ptf.train.export import probe_of
    from ptf.train.parts import parts_of
    from ptf.train.rendered import rendered

    if (model / FILES["layers."]).is_file():
        raise UserError(
            f"not published: layers of model.replace have tensors that no Hugging Face model has, so whoever loads {model} with transformers or vLLM would "
            f"get random ones in their place. The whole model is there, theirs in {FILES['layers.']}: train on from it with the same model.replace"
        )
    place = job.model.tokenizer or str(locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes))
    trained = rendered(job, tokenizer_of(place, job.model.tokens), run)
    served = Tokenizer.load(str(model))
    served.rendering = trained.rendering  # a server renders the day on which it serves
    if served.fingerprint() != trained.fingerprint():
        raise UserError(f"not published: the tokenizer in {model} gives other ids than the one that was trained with")
    probe = probe_of(run)
    if "values" in probe:
        difference = head_difference(model, probe["tokens"], probe["values"], parts_of(job.model))
    else:
        difference = export_difference(model, probe["tokens"], probe["logprobs"])
    whole = job.train.precision == "fp32" and export_dtype(model) == torch.float32
    bound = LOGPROB_BOUND["fp32" if whole else "bf16"]
    if not difference <= bound:
        raise UserError(f"not published: loaded in transformers, {model} differs from the trained model by {difference:.3g} in a log-prob (bound {bound:g})")
    return difference


def _refuse_worse(job: Job, artifact: Artifact, published: Mapping[str, Any] | None) -> None:
    """Where training started from what is published, that is what was measured beside the new model, on the same held-out data."""
    from ptf.eval import refuse_regression

    metric = job.publish.metric
    if metric:
        before = published["metrics"] if published else {}
        if published and f"start/{metric}" in artifact.metrics and artifact.models.get(job.model.path) == f"{job.versions}/{published['version']}":
            before = {metric: artifact.metrics[f"start/{metric}"]}
        refuse_regression(artifact.metrics, before, metric, job.publish.max_drop, job.publish.mode)
