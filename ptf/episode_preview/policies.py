"""The policy of a preview: the model that the job begins with, another model, or a script."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ptf.config import Job, load, resolve
from ptf.data.added import add, tokenizer_of
from ptf.data.tokenizer import Tokenizer
from ptf.episode_preview import scripts
from ptf.episode_preview.scripts import Script
from ptf.errors import UserError
from ptf.model import bridge, hub
from ptf.run import datasets_at_commits, prepared_directory, published_models, unpublished
from ptf.storage.hub import at_revision
from ptf.train.job_tokenizer import rendered

ECHO, EMPTY = "echo", "empty"
SCRIPTS: dict[str, str] = {ECHO: "it repeats the last user message", EMPTY: "it answers nothing"}


@dataclass(frozen=True)
class PreviewPolicy:
    """The policy of a preview, and the job with the paths that it needs."""

    job: Job  # its section `model` loads the policy, or, with a script, names the tokenizer
    line: str  # what the policy is, in words
    script: Callable[[Tokenizer], Script] | None = None  # None: the model


def policy_of(job: Job, named: str | None) -> PreviewPolicy:
    """Return the policy that is named: `echo`, `empty`, a file of responses, or a model; None is the job's own model,
    or `echo` if its weights are not on this machine. Raises UserError if there is no such policy.

    A model is a directory, the directory of a run, a directory of versions, the YAML of a job that has published one, a
    URI or a Hugging Face id. `data.prepare` runs if its output does not exist.
    """
    if named in SCRIPTS:
        return PreviewPolicy(_with_paths(job), f"{named}: {SCRIPTS[named]}", script_of(named))
    if named is not None and os.path.isfile(named) and not named.endswith((".yaml", ".yml")):
        script = scripts.of_file(named)
        return PreviewPolicy(_with_paths(job), f"the responses of {named}", lambda _: script)
    if named is not None:
        other = _with_model(job, named)
        return PreviewPolicy(other, f"the model {other.model.path}")
    job = _with_paths(job)
    if reason := _why_not_own(job):
        return PreviewPolicy(job, f"echo, because {reason}: {SCRIPTS[ECHO]}", script_of(ECHO))
    drawn = " with random weights" if job.model.init == "random" else ""
    return PreviewPolicy(job, f"the job's own model {job.model.path}{drawn}")


def script_of(name: str) -> Callable[[Tokenizer], Script]:
    """Return what makes the script of this name from a tokenizer."""
    return scripts.echo if name == ECHO else lambda _: scripts.empty


def _with_paths(job: Job) -> Job:
    """Return the job with `prepare:` and `job:` replaced by paths; what has not been published stays."""
    datasets = datasets_at_commits(job)
    return resolve(job, prepared=prepared_directory(job), models=published_models(job), datasets=datasets)


def _with_model(job: Job, named: str) -> Job:
    """Return the job with another model in place of its own."""
    if named.endswith((".yaml", ".yml")):
        named = load(named).versions
    elif os.path.isfile(Path(named) / "job.yaml"):
        named = str(Path(named) / "model")
    elif not os.path.exists(named) and "://" not in named and not (_is_hub_id(named) and "/" in named):
        raise UserError(f"--policy: there is no file and no model {named}; without either: {', '.join(SCRIPTS)}")
    whole = {"backend": "ptf", "init": "pretrained", "tokenizer": None}
    whole |= {"tokens": None, "lora": None, "trainable": None}
    return _with_paths(job.model_copy(update={"model": job.model.model_copy(update={"path": named, **whole})}))


def _why_not_own(job: Job) -> str | None:
    """Return why the job's own model cannot answer here; None if it can."""
    path = job.model.path
    if config := unpublished(job, {}).get("model.path"):
        return f"{config} has published no model yet"
    if "://" in path:
        return None  # it is copied, as for a run
    if os.path.isdir(path):
        directory = bridge.local_directory(path, verify_up_to=None)
        there = job.model.init == "random" or any(directory.glob("*.safetensors"))
        return None if there else f"{path} has no weights"
    if not _is_hub_id(path):
        return f"there is no directory {path}"
    if hub.cached(path) is None:
        return f"{path} is not in the cache of this machine (--policy {path} downloads it)"
    return None


def _is_hub_id(path: str) -> bool:
    """Return whether a path can only be a Hugging Face id."""
    is_place = os.path.isdir(path) or "://" in path or path.startswith((".", "/", "~"))
    return at_revision(path)[0].count("/") <= 1 and not is_place


def tokenizer_without_model(job: Job) -> Tokenizer:
    """Return the tokenizer of a job whose model need not exist.

    If another job makes the model and has not published it, its tokenizer is that of the model which that job begins
    with.
    """
    config = unpublished(job, {}).get("model.path")
    if job.model.tokenizer is None and config is not None:
        tokenizer = tokenizer_without_model(_with_paths(load(config)))
        if job.model.tokens is not None:
            add(tokenizer, job.model.tokens)
    else:
        path = job.model.tokenizer or job.model.path
        if not _is_hub_id(path):
            path = str(bridge.local_directory(path, verify_up_to=None))
        tokenizer = tokenizer_of(path, job.model.tokens)
    return rendered(job, tokenizer, None)
