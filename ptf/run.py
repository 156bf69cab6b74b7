"""Running a job: an online recipe has one controller, an offline recipe runs as SPMD ranks.

`python -m ptf.run CONFIG` is one such rank, under a torchrun that was started by hand or by this module.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ptf.workspace import entry  # imported first: it records the parent process

# isort: split
from ptf import storage
from ptf.artifact import Artifact
from ptf.compute import launch, shutdown
from ptf.compute.device_defaults import settled
from ptf.compute.lease import Lease, hold_lease
from ptf.compute.tracking import raise_if_no_login
from ptf.config import (
    Job,
    dump,
    fingerprint,
    load,
    loads,
    model_paths,
    plugin,
    raise_if_fixed_keys_changed,
    resolve,
    shown,
    sources_of,
)
from ptf.config.plugin import PLUGINS, plugin_path
from ptf.config.plugin_code import code_of, uses
from ptf.config.sections.data import Source
from ptf.data.prepare import prepare
from ptf.data.sources import hub
from ptf.errors import Retryable, UserError
from ptf.storage import published_versions
from ptf.workspace import disk, progress, scratch
from ptf.workspace.credentials import redacted

if TYPE_CHECKING:
    from ptf.compute.world import World


def raise_if_unknown_run(run_name: str, directories: Sequence[Path]) -> None:
    """Raise UserError unless a run has begun in one of the directories, which are those of the runs that continue."""
    check_run_name(run_name)
    if not any((directory / JOB).exists() for directory in directories):
        raise UserError(
            f"--continue {run_name}: {directories[0].parent} has no run of this name; give the name that an earlier "
            "run printed, or leave --continue out"
        )


def new_run_name(job: Job) -> str:
    """Return a new name for a training run, which every resume of it keeps. It begins with the recipe."""
    recipe = job.recipe if isinstance(job.recipe, str) else "plugin"
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


JOB = "job.yaml"  # in the run's directory; its last line is SEAL and a digest
SEAL = "# SHA-256 of the run name and of what is above: "
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
OF_THE_JOB = ("start", "extended", "tokenizer", "rendered", "quarantine")  # what an attempt makes before its first step
TAKEN = ("prepared", "tokenized", "precomputed", "published", "models")  # directories that runs share below `output`


def check_run_name(run_name: str) -> None:
    """Raise UserError if `run_name` cannot be the name of a run's directory."""
    if not RUN_NAME.fullmatch(run_name):
        raise UserError(
            f"{run_name!r} cannot be the name of a training run: at most 200 letters, digits, dots, "
            "hyphens and underscores, the first a letter or a digit "
            "(without --run-name a new run gets one)"
        )
    if run_name in TAKEN:
        raise UserError(
            f"{run_name!r} cannot be the name of a training run: a directory of that name is shared by all runs; "
            "choose a different name"
        )


def prepared_directory(job: Job) -> str | None:
    """Run `data.prepare` unless its output exists, and return the output's directory; None if the job has none."""
    if job.data.prepare is None:
        return None
    for reason in code_of(job.data.prepare.model_dump()).unseen:
        print(f"prepare: {reason}", flush=True)
    with progress.stage("prepare"):
        return prepare(
            plugin.bind(job.data.prepare), fingerprint(job, "data.prepare"), f"{job.output}/prepared", job.verify_bytes
        )


def published_models(job: Job, begun: Job | None = None) -> dict[str, str]:
    """Map each model path that refers to published versions to the version to load: that of `begun`, the job of an
    earlier attempt, or else the one that is current now.

    Such a path is `job:…` or a directory of versions; it is omitted if nothing has been published there. Later stages
    use the mapping, so that all of them read the same version.
    """
    then, versions = model_paths(begun) if begun else {}, {}
    for key, path in model_paths(job).items():
        place = load(path.removeprefix("job:")).versions if path.startswith("job:") else path
        if not path.startswith("prepare:") and (version := published_versions.latest(place)):
            versions[path] = then.get(key, version)
    return versions


def unpublished(job: Job, models: Mapping[str, str]) -> dict[str, str]:
    """Return the config path of every `job:` that has published nothing yet, by the model's config key."""
    return {
        key: path.removeprefix("job:")
        for key, path in model_paths(job).items()
        if path.startswith("job:") and path not in models
    }


def datasets_at_commits(job: Job, begun: Job | None = None) -> dict[str, str]:
    """Map the key of each source that is a dataset on the Hub to its path at the commit to read; omit sources that name
    a commit.

    Later stages and resumes use the mapping, so that all of them read the same commit. If the config names no revision,
    it is the commit that `begun`, the job of an earlier attempt, read; otherwise it is the revision's newest commit.
    """
    before = sources_of(begun) if begun else {}
    datasets = {}
    for key, source in sources_of(job).items():
        is_elsewhere = source.kind == "tokenized" or source.path.startswith("prepare:")
        repo = None if is_elsewhere else hub.parse_location(source.path)
        if repo is not None and not (repo.revision and hub.COMMIT.fullmatch(repo.revision)):
            then = before.get(key) if repo.revision is None else None
            datasets[key] = repo.at((then and _commit_read(then)) or hub.commit_of(repo.id, repo.revision))
    return datasets


def _commit_read(source: Source) -> str | None:
    """Return the commit that a recorded job read from the Hub, when it was tokenized or while it trained."""
    if source.kind != "tokenized":
        repo = hub.parse_location(source.path)
        return repo.revision if repo else None
    manifest = f"{source.path.rstrip('/')}/{storage.MANIFEST}"
    return json.loads(storage.read_text(manifest)).get("commit") if storage.exists(manifest) else None


def flow_of(job: Job) -> str:
    """Return the name of a flow that runs the job: its recipe's, or for a plugin recipe `sft` or, if online, `grpo`."""
    if isinstance(job.recipe, str):
        return job.recipe
    return "sft" if job.rollout is None else "grpo"


def inputs_of(job: Job, run_name: str | None = None, *, complete: bool = True) -> Artifact:
    """Return the prepared data, the versions of published models, and the commits of datasets that the job reads.

    What an earlier attempt at `run_name` read takes precedence. With `complete`, raises UserError if a `job:` has
    published nothing.
    """
    if run_name is not None:
        check_run_name(run_name)
    begun = begun_job(Path(job.output) / run_name) if run_name else None
    models = published_models(job, begun)
    for key, config in unpublished(job, models).items() if complete else ():
        raise UserError(
            f"{key}: {config} has published no model yet; make it first: "
            f"python flows/{flow_of(load(config))}_flow.py run --config {config}"
        )
    return Artifact(run_name or "", prepared_directory(job), models, datasets_at_commits(job, begun))


def resolved(job: Job, run_name: str | None = None, *, complete: bool = True) -> Job:
    """Return the job with what `inputs_of` finds in place of `prepare:`, `job:` and the datasets of the Hub."""
    found = inputs_of(job, run_name, complete=complete)
    return resolve(job, prepared=found.prepared, models=found.models, datasets=found.datasets)


def remove_leftovers(job: Job, run_name: str) -> None:
    """Remove the temporary files that killed processes left in the directories that this job and this run write to."""
    places = {job.output: 1, f"{job.output}/{run_name}": 4} | (
        {job.versions: 1} if storage.is_local(job.versions) else {}
    )
    for place in {path: None for root, depth in places.items() for path in scratch.sweep(Path(root), depth)}:
        print(f"removed {place}, which a killed process had left", flush=True)


def run(job: Job, run_name: str) -> Path:
    """Train a resolved job, from the run's newest checkpoint if there is one, and return the run's directory.

    The directory contains metrics.jsonl, tensorboard/, checkpoints/ and model/, a Hugging Face directory. Raises
    RunInUse if a different process is training the run.
    """
    check_run_name(run_name)
    directory = Path(job.output) / run_name
    job = settled(shown(job), begun_job(directory))
    with disk.disk_errors_as_user_errors(
        job.output, *([job.checkpoint.to] if job.checkpoint.to and storage.is_local(job.checkpoint.to) else [])
    ):
        if (job.compute.address or "").startswith(("http://", "https://")):
            submit_and_wait(job, run_name, directory)  # the submitted job holds the lease
        else:
            with hold_lease(job, directory) as lease:
                begin(job, directory)
                if job.rollout:
                    with entry.large_imports():
                        from ptf.rl.online_run import train_online

                    train_online(job, directory, lease)
                elif launch.needs_ray(job.compute):
                    from ptf.compute.gang import on_ray

                    with shutdown.sigterm_stops(directory):
                        on_ray(run_rank, (str(directory), lease), job.compute, directory, "train")
                elif job.compute.launcher == "torchrun":
                    with shutdown.sigterm_stops(directory):
                        launch.torchrun([str(directory), "--lease", json.dumps(vars(lease))], job.compute, directory)
                else:
                    run_rank(str(directory), lease)
    return directory


def begin(job: Job, directory: Path) -> None:
    """Begin an attempt at the run in the directory, whose lease the caller holds."""
    if job.track.wandb_project:
        raise_if_no_login()
    write_job_file(job, directory)
    if not os.environ.get(launch.LAUNCHED):
        (directory / shutdown.STOP).unlink(missing_ok=True)
        remove_leftovers(job, directory.name)


def submit_and_wait(job: Job, run_name: str, directory: Path) -> None:
    """Train as a job of a Ray cluster that has the same directories and the same Python as this machine.

    Raises UserError if the job is refused, Retryable if it fails otherwise.
    """
    from ptf.compute import ray_jobs

    command = [
        sys.executable,
        "-m",
        "ptf.cli",
        "train",
        str((directory / JOB).resolve()),
        "--run-name",
        run_name,
        "--set",
        "compute.address=auto",
        "--set",
        f"output={Path(job.output).resolve()}",
    ]

    def anew() -> None:
        with hold_lease(job, directory):
            begin(job, directory)

    with shutdown.sigterm_stops(directory):
        name, address = f"ptf-{run_name}-train", job.compute.address or ""
        ended = ray_jobs.follow(address, name, command, job.compute.timeout_s, anew=anew)
    if ended.status != "SUCCEEDED":
        refused = ended.driver_exit_code == 2 and not shutdown.is_asked_to_stop(directory)
        said = (ended.message or "").strip() or "see its output above"
        message = f"the job ended as {ended.status}: {said}"
        raise UserError(message) if refused else Retryable(message)


def write_job_file(job: Job, directory: Path) -> None:
    """Write the run's job.yaml, and where its plugins are found with the digests of their code. Raises UserError, and
    keeps the file, if the job differs from it in a fixed key.

    A run that has made no step fixes no key: what its earlier attempts made is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if begun := begun_job(directory):
        raise_if_fixed_keys_changed(begun, job)
    for name in () if has_stepped(directory) else OF_THE_JOB:
        shutil.rmtree(directory / name, ignore_errors=True)
    file, values = directory / PLUGINS, job.model_dump()
    if not all(use.startswith("ptf.") for use in uses(values)):
        code = code_of(values).digests
        then = json.loads(file.read_bytes())["code"] if file.is_file() else {}
        if changed := [module for module in then if code.get(module) != then[module]]:
            print(f"the code of {', '.join(changed)} has changed since this run was last trained", flush=True)
        storage.write_text(str(file), json.dumps({"directories": plugin_path(), "code": code}))
    storage.write_text(str(directory / JOB), _sealed(directory, dump(job)))


def has_stepped(directory: Path) -> bool:
    """Return whether an attempt at the run in this directory has made a step, which fixes keys."""
    metrics = directory / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((directory / "checkpoints").glob("*"))


def begun_job(directory: Path) -> Job | None:
    """Return the stored job of a run that has made a step; None for others, which begin anew."""
    text = read_job_file(directory) if has_stepped(directory) else None
    return loads(text) if text else None


def read_job_file(directory: Path) -> str | None:
    """Return the text of the job.yaml that an earlier attempt at a run wrote; None if there was no earlier attempt.

    Raises Corrupt if the file was changed since.
    """
    file = directory / JOB
    try:
        content = file.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        content = ""
    text = content.rpartition(SEAL)[0]
    if content != _sealed(directory, text):
        raise storage.Corrupt(
            f"{file} was changed after this run wrote it; if you are sure that the config is the one that this run "
            "began with, remove the file, and it is written again"
        )
    return text


def _sealed(directory: Path, text: str) -> str:
    """Return the text of a job with a last line that seals it: a digest of the run's name and of the text."""
    digest = hashlib.sha256(f"{directory.name}\n{text}".encode()).hexdigest()
    return f"{text}{SEAL}{digest}\n"


def run_rank(directory: str, lease: Lease, world: "World | None" = None) -> None:
    """Train as one rank of the offline run in the directory, by its stored job; the process that started it holds the
    lease. `world`: the rank that this process is already."""
    with entry.large_imports():
        from ptf.train.loop import train_offline

    text = read_job_file(Path(directory))
    assert text is not None, "the run has begun"
    job = loads(text)
    with contextlib.nullcontext(world) if world else world_of(job) as joined:
        train_offline(job, joined, Path(directory), lease)


def world_of(job: Job) -> "contextlib.AbstractContextManager[World]":
    """Return a context manager that makes this process one of the job's ranks."""
    from ptf.compute.world import joined

    of = job.compute
    return joined(of.device, of.timeout_s, of.mesh.sizes(of.workers), of.threads or launch.default_threads())


def run_by_hand(job: Job, run_name: str | None) -> None:
    """Train as one of the ranks of a torchrun that was started by hand; the first one begins the run for all."""
    if job.rollout:
        raise UserError("an online recipe has one controller, not ranks: use `ptf train` or its flow")
    if job.compute.workers != (size := int(os.environ.get("WORLD_SIZE", 1))):
        raise UserError(f"compute.workers is {job.compute.workers}, but torchrun started {size} processes")
    with disk.disk_errors_as_user_errors(job.output), world_of(job) as world, contextlib.ExitStack() as held:

        def begun() -> tuple[str, Lease]:
            found = shown(resolved(job, run_name))
            directory = Path(found.output) / (run_name or new_run_name(found))
            print(f"run name {directory.name}", flush=True)
            lease = held.enter_context(hold_lease(found, directory))
            begin(settled(found, begun_job(directory)), directory)
            return str(directory), lease

        directory, lease = world.together(begun)
        run_rank(directory, lease, world)
        if world.leads:
            print(f"trained: {directory}/model", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Train as one rank of `torchrun … -m ptf.run CONFIG… [--set a.b=c]… [--run-name NAME]`."""
    parser = argparse.ArgumentParser(
        prog="python -m ptf.run", description="Train a job on the ranks that torchrun started."
    )
    parser.add_argument("config", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--run-name", help="name of the run; continues a run of this name, otherwise begins one")
    # held by the process that started torchrun, for the run whose directory is in place of a config
    parser.add_argument("--lease", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    # for a rank whose torchrun was started by hand; ranks that ptf started are bound to their parent before any import
    entry.end_with_parent(entry.STARTED_BY)
    try:
        if given.lease:
            (directory,) = given.config
            with disk.disk_errors_as_user_errors(directory):
                run_rank(directory, Lease(**json.loads(given.lease)))
        else:
            run_by_hand(load(*given.config, overrides=given.set), given.run_name)
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        print(redacted(f"rank {rank}: {error}" if rank else str(error)), file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
