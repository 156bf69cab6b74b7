"""Running a job: the hybrid of SPMD and single controller in one `if`. Also `python -m ptf.run CONFIG` under torchrun."""

import argparse
import os
import sys
import time
from pathlib import Path

from ptf import recipes, storage
from ptf.compute import launch
from ptf.compute.world import World, joined
from ptf.config import Job, dump, fingerprint, load, loads, plug, resolve
from ptf.data.prepare import prepare
from ptf.errors import UserError


def mint(prefix: str) -> str:
    """A new lineage: names one training run, and every resume of it."""
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def prepared_directory(job: Job) -> str | None:
    """Run `data.prepare` unless its output is there already; None if the job has none."""
    if job.data.prepare is None:
        return None
    return prepare(plug.bind(job.data.prepare), fingerprint(job, "data.prepare"), f"{job.output}/prepared")


def published_by(config: str) -> str | None:
    """The directory of the model that another config last published; None if nothing is."""
    other = load(config)
    root = other.publish.to or f"{other.output}/published"
    return root if storage.exists(f"{root}/latest.json") else None


def resolved(job: Job) -> Job:
    """The job with `prepare:` and `job:` replaced by what they point at. Raises UserError if a `job:` has published nothing."""
    start = None
    if job.model.path.startswith("job:"):
        config = job.model.path.removeprefix("job:")
        start = published_by(config)
        if start is None:
            flow = f"flows/{load(config).recipe}_flow.py"
            raise UserError(f"model.path: {config} has published no model yet; make it first: python {flow} run --config {config}")
    return resolve(job, prepared=prepared_directory(job), start=start)


def run(job: Job, lineage: str) -> Path:
    """Train a resolved job, from its lineage's newest checkpoint if there is one. Returns the run's directory: metrics.jsonl, tensorboard/,
    checkpoints/, and `model/`, a Hugging Face directory."""
    directory = Path(job.output) / lineage
    directory.mkdir(parents=True, exist_ok=True)
    text = dump(job)
    storage.write_text(str(directory / "job.yaml"), text)
    compute = job.compute
    if recipes.build(job).online:
        from ptf.rl.fit import fit_online

        fit_online(job, directory)
    elif compute.launcher == "ray":
        launch.on_ray(
            work, (text, str(directory)), workers=compute.workers, device=compute.device, threads=compute.threads, address=compute.address,
            workdir=directory, timeout_s=compute.timeout_s,
        )  # fmt: skip
    elif compute.launcher == "torchrun":
        threads = compute.threads or launch.default_threads(compute.workers)
        launch.torchrun([str(directory / "job.yaml"), "--lineage", lineage], compute.workers, threads)
    else:
        work(text, str(directory))
    return directory


def work(text: str, directory: str) -> None:
    """What every rank of an offline job runs."""
    from ptf.train.fit import fit

    job = loads(text)
    with world_of(job) as world:
        fit(job, world, Path(directory))


def world_of(job: Job):
    compute = job.compute
    threads = compute.threads or launch.default_threads(int(os.environ.get("WORLD_SIZE", 1)))
    return joined(compute.device, compute.timeout_s, compute.mesh.replicate, threads)


def main_train(job: Job, lineage: str | None) -> int:
    """`ptf train`: a whole training run without an orchestrator."""
    lineage = lineage or mint(job.recipe if isinstance(job.recipe, str) else "plug")
    print(f"lineage {lineage} (after a failure: the same command with --lineage {lineage})", flush=True)
    directory = run(resolved(job), lineage)
    print(f"trained: {directory / 'model'}   metrics: {directory / 'metrics.jsonl'}", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """One rank of `torchrun … -m ptf.run CONFIG… [--set a.b=c]… [--lineage ID]`."""
    parser = argparse.ArgumentParser(prog="python -m ptf.run", description="Train a job on the ranks that torchrun started.")
    parser.add_argument("config", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--lineage", help="continue this run from its newest checkpoint")
    given = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", 0))
    try:
        job = load(*given.config, overrides=given.set)
        if recipes.build(job).online:
            raise UserError("an online recipe has one controller, not ranks: use `ptf train` or its flow")
        if job.compute.workers != int(os.environ.get("WORLD_SIZE", 1)):
            raise UserError(f"compute.workers is {job.compute.workers}, but torchrun started {os.environ.get('WORLD_SIZE', 1)} processes")
        from ptf.train.fit import fit

        with world_of(job) as world:
            job = _resolve_once(job, world)
            lineage = str(world.share(given.lineage or mint("sft")))
            directory = Path(job.output) / lineage
            if world.leads:
                print(f"lineage {lineage}", flush=True)
                directory.mkdir(parents=True, exist_ok=True)
                storage.write_text(str(directory / "job.yaml"), dump(job))
            fit(job, world, directory)
    except UserError as error:
        if rank == 0:
            print(error, file=sys.stderr, flush=True)
        return 2
    return 0


def _resolve_once(job: Job, world: World) -> Job:
    """Rank 0 prepares, the others take what it made; its error is everyone's."""
    try:
        text: str | UserError = dump(resolved(job)) if world.leads else ""
    except UserError as error:
        text = error
    shared = world.share(text)
    if isinstance(shared, UserError):
        raise shared
    return loads(str(shared))


if __name__ == "__main__":
    sys.exit(main())
