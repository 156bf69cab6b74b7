"""The public functions of ptf, which `import ptf` offers: each is one stage, from a config to a published model.

The commands of `ptf`, the flows' steps and a Python script call the same functions below these. Heavy packages (torch,
transformers, Ray) are imported only when a function is called.
"""

import os
from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

from ptf.config import Job, dump
from ptf.config.plugin_checks import load_checked, problems
from ptf.config.tree import Problems, parse
from ptf.serving.options import ServingOptions

if TYPE_CHECKING:
    from ptf.episode_preview.report import Preview
    from ptf.inspection.report import Report
    from ptf.serving.conversation import Chat
    from ptf.training_run import Run


def load(files: str | PathLike[str] | Sequence[str | PathLike[str]], overrides: Sequence[str] = ()) -> Job:
    """Read a job from one YAML file, or from several that are merged left to right, and then apply `overrides`
    (`["train.lr=1e-4"]`). Plugins are imported and their arguments compared with their signatures. Raises ConfigError
    with every problem, each with its file and line."""
    return load_checked(*([files] if isinstance(files, str | PathLike) else files), overrides=overrides)


def check(job: Job, *, dry_run: bool = False, paths: bool = True) -> str:
    """Check a job before it is trained, and return lines about it.

    What the job names is opened (ptf.inspection.touch). The last line says how often the job passes over its data and
    how many steps that takes, or what was not looked at. With `dry_run`, one step of it is trained, too, on
    a tiny model of the same family in this process. Without `paths`, local data files and model directories may be
    missing: they are on other machines, or another job makes them. Raise UserError with what would stop the run.
    """
    from ptf.inspection.places import missing

    root = parse(dump(job)).root
    if faults := [*problems(root), *(missing(root) if paths else ())]:
        raise Problems(faults)
    from ptf.compute.device_defaults import settled

    said = list[str]()
    job = settled(job, tell=said.append)
    ranking = job.evaluate.ranking
    if job.publish.metric is not None or job.publish.guards or (ranking and ranking.baselines):
        from ptf.evaluate.gate import check_evaluation

        check_evaluation(job)
    from ptf.inspection.touch import touch

    if not dry_run:
        return "\n".join([*said, *touch(job)])
    from ptf.inspection.dry_run import fetched, rehearse

    job = fetched(job)
    found = touch(job)
    rehearse(job)
    return "\n".join([*said, *found])


def inspect(job: Job, *, rows: int | None = None, samples: int = 1) -> "Report":
    """Look at a job's data as training will see it: `rows` rows of each source (None: all of them where all sources
    have at most 100,000 together, else 2,000 of each), and the first `samples` samples of each. Raises UserError for
    data that cannot be read."""
    from ptf.inspection.report import report

    return report(job, rows, samples)


def try_episodes(job: Job, episodes: int = 8, *, policy: str | None = None) -> "Preview":
    """Play episodes of an online job without training, twice with the same seeds, and return what was found.

    `policy` is `echo` (repeat the last user message), `empty`, a file of responses (a line for each episode; in
    `.jsonl` a line is a string, or a list of strings by turn), or a model: a directory, a run's directory, a URI, a
    Hugging Face id, or the YAML of a job that has published one. None is the model that the job begins with, or `echo`
    if its weights are not on this machine. Raises UserError for a job that cannot be played.
    """
    from ptf.episode_preview.preview_job import preview_job

    return preview_job(job, episodes, policy)


def train(job: Job, run_name: str | None = None) -> "Run":
    """Train a job and return its run. A run called `run_name` that exists goes on from its newest checkpoint; None
    makes a new one. The launcher of the config (`compute`) decides which processes train. Raises UserError, and
    RunInUse where another process is training this run."""
    from ptf.training_run import train as train_run

    return train_run(job, run_name)


def replay(run: "Run | str | PathLike[str]", run_name: str | None = None) -> bool:
    """Train a finished run once more as `run_name` (default: its name and `-replay`), with what the wall clock decided
    in it (`rollout.clock: wall`), and return whether the weights and all metrics but times have the same bits. Raises
    UserError."""
    from ptf.evaluate.replay import replay as replay_run

    there = _run(run, ())
    return replay_run(there, run_name or f"{there.name}-replay")


def evaluate(
    run: "Run | str | PathLike[str]", job: Job | None = None, *, overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Measure a trained run by what its job holds out, print a table, keep the metrics in the run, and return them by
    name; `starting_model/…` is of the model that training started from. `overrides` change keys that are free to
    change, such as `evaluate.limit`. With `job`, `run` names any model instead (a directory, a URI or a Hugging Face
    id), which is measured by that job. Raises UserError, and RunInUse where another process works in the run."""
    from ptf.evaluate.evaluation import evaluate_model, evaluate_run

    if job is not None:
        return evaluate_model(job, _place(run))
    training_run = _run(run, overrides)
    training_run.raise_if_unfinished()
    return evaluate_run(training_run.job, training_run.directory)


def publish(run: "Run | str | PathLike[str]", *, overrides: Sequence[str] = ()) -> str:
    """Publish a run's model as a version below `publish.to`, and return its directory or URI. It must give the trained
    model's log-probs when it is loaded again, and must not be significantly worse than what training started
    from. `overrides` change
    keys that are free to change, such as `publish.gate`. Raises UserError, and RunInUse where another process works in
    the run."""
    from ptf.publish.publishing import publish as publish_version

    training_run = _run(run, overrides)
    return str(publish_version(training_run.job, training_run.artifact()).published)


def chat(
    model: "Run | Job | str | PathLike[str]",
    *,
    system: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    seed: int = 0,
) -> "Chat":
    """Load a model for a conversation: `ptf.chat(run).answer("2+2=")`. `model` is a run, a job (whose published version
    is loaded), or a directory, a URI or a Hugging Face id of a model or of an adapter in PEFT format. A response has at
    most `max_new_tokens`; without it 256, or what the model can still read. Raises UserError for a model that generates
    no responses."""
    from ptf.serving.conversation import Chat

    return Chat(
        _place(model), system=system, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )


def serve(
    model: "Run | Job | str | PathLike[str]",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    name: str | None = None,
    options: ServingOptions | None = None,
) -> None:
    """Serve a model at an address with OpenAI's API until SIGINT or SIGTERM, and print the address. `model` is a run,
    a job (whose published version is served), or a directory, a URI or a Hugging Face id of a model, of an adapter in
    PEFT format, or of a run. Clients ask for it as `name`. A host that other machines reach needs `api_key`. Raises
    UserError for a model or an address that cannot be served."""
    from ptf.serving.public_endpoint import serve as serve_model
    from ptf.serving.served_model import ServedModel

    if isinstance(model, Job):
        served = ServedModel(_place(model), name or model.output.rstrip("/").rpartition("/")[2], model)
    elif isinstance(model, str | PathLike) and not os.path.isfile(os.path.join(fspath(model), "job.yaml")):
        served = ServedModel(_place(model), name or _place(model).rstrip("/").rpartition("/")[2])
    else:
        run = _run(model, ())
        run.raise_if_unfinished()
        served = ServedModel(str(run.model), name or run.name, run.job, run.directory)
    serve_model(served, options or ServingOptions(), host=host, port=port, key=api_key)


def _place(model: "Run | Job | str | PathLike[str]") -> str:
    """Return where a model is: of a run, of a job (its published version), or the place that is named."""
    if isinstance(model, Job):
        from ptf.publish.publishing import versions_of

        return versions_of(model)
    return fspath(model if isinstance(model, str | PathLike) else model.model)


def _run(run: "Run | str | PathLike[str]", overrides: Sequence[str]) -> "Run":
    """Read a run from its directory, where it may have been evaluated since."""
    from ptf.training_run import Run

    return run.updated(overrides) if isinstance(run, Run) else Run.at(fspath(run), overrides)
