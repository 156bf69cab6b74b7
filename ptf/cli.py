"""The console script `ptf`.

What a command needs is imported when it runs: `ptf --help` imports neither pydantic nor rich, and only the commands
that need it import torch. rich is imported here, in ptf/inspection/{plan,terminal}.py and in
ptf/episode_preview/terminal.py only. A `UserError` is printed as one message with exit status 2; any other exception is
a fault of ptf and keeps its traceback.
"""

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import ptf
from ptf import storage
from ptf.errors import UserError
from ptf.workspace import disk
from ptf.workspace.credentials import redacted

JOB = "job.yaml"  # what makes a directory that of a run (ptf.run)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ptf</title><style>
body {{ color: {foreground}; background: {background}; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; width: 182ch; }}
{stylesheet}
</style></head><body><pre>{code}</pre></body></html>
"""

if TYPE_CHECKING:
    from rich.console import Console

    from ptf.config import Job
    from ptf.model.verify import Case
    from ptf.rl.online_budget import OnlineBudget
    from ptf.train.budget import Budget
    from ptf.train.memory_search import Setting
    from ptf.train.roofline import Roofline


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. 0: success. 1: the command ran and found a problem (check-model,
    inspect, check-engine, try), or the job does not fit (plan). 2: it stopped with one message."""
    options = _parser().parse_args(argv)
    try:
        with disk.disk_errors_as_user_errors(getattr(options, "html", None) or "."):
            return options.run(options)
    except UserError as error:
        return fail(error)


def console(file: TextIO | None = None, *, width: int | None = None, **options: Any) -> "Console":
    """Return a console on `file` (None: standard output), `width` columns wide where that is no terminal.

    It prints texts as they stand: `:x:` in a path or a message is no picture.
    """
    from rich.console import Console

    width = None if (file or sys.stdout).isatty() else width
    return Console(file=file, width=width, emoji=False, **options)


def _job(options: argparse.Namespace, *more: str) -> "Job":
    from ptf.config import load

    return load(*options.config, overrides=[*options.set, *more])


def fail(error: UserError) -> int:
    """Print what the user can mend, and return the exit status."""
    console(sys.stderr).print(redacted(str(error)), style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def check(options: argparse.Namespace) -> int:
    """Report everything that is wrong with a config, or print it whole."""
    from ptf.config import dump
    from ptf.config.plugin_checks import load_checked
    from ptf.inspection.places import missing

    job = load_checked(*options.config, overrides=options.set, more=None if options.skip_paths else missing)
    with only_ours(not options.dry_run):  # rewards may print
        found = ptf.check(job, dry_run=options.dry_run, paths=not options.skip_paths)
    text = dump(job) if not options.dry_run else ""
    if text and sys.stdout.isatty():
        from rich.syntax import Syntax

        console().print(Syntax(text, "yaml", background_color="default"))
    else:
        sys.stdout.write(text)
    for line in found.splitlines():
        print(f"check: {redacted(line)}", file=sys.stderr)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print versions, devices and limits of this machine."""
    from rich.box import SIMPLE
    from rich.table import Table

    from ptf.inspection.doctor import findings

    table = Table("", "", "what is off", box=SIMPLE)
    for finding in findings():
        table.add_row(*finding, style="yellow" if finding.problem else None)
    console(width=160, markup=False, highlight=False).print(table)
    return 0


def train(options: argparse.Namespace) -> int:
    """Train a job to its end."""
    job = _job(options)
    if options.continued:
        from ptf.run import raise_if_unknown_run

        raise_if_unknown_run(options.continued, [Path(job.output) / options.continued])
    ptf.train(job, options.continued or options.run_name)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Train a finished run once more; status 1 if it ends with other bits."""
    return 0 if ptf.replay(options.where, options.run_name) else 1


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a run on its own held-out data, or any model on that of `--config`."""
    if options.config:
        ptf.evaluate(options.where, _job(options))
    elif not (Path(options.where) / JOB).is_file():
        raise UserError(
            f"{options.where} is not the directory of a training run: it has no {JOB}. To evaluate a model, give a "
            "config with the evaluation data: ptf evaluate MODEL --config CONFIG"
        )
    else:
        ptf.evaluate(options.where, overrides=options.set)
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print memory, FLOPs and time of a step; with `--roofline` the upper bound of its MFU, with `--fit` what fits."""
    from ptf.inspection import plan as plan_report
    from ptf.train.memory_search import Setting, search

    if options.fit and options.roofline:
        raise UserError("give --fit first, and then --roofline with the arguments that it found")
    workers = options.workers or _job(options).compute.workers
    given, candidates = Setting(workers, {}), []
    if options.fit:
        candidates = list(search(_planned_job(options, given), workers, lambda one: _plan(options, one)[0]))
        if candidates and candidates[-1].fits:
            given = candidates[-1].setting
        elif not any(candidate.plan for candidate in candidates):
            reasons = dict.fromkeys(f"{candidate.setting}: {candidate.refused}" for candidate in candidates)
            raise UserError("\n".join(["ptf plan --fit found no setting that the job can have:", *reasons]))
    found, bound = _plan(options, given)
    if options.json:
        print(json.dumps(plan_report.as_json(found, bound) | plan_report.candidates_as_json(candidates), indent=2))
    else:
        out = console(width=180)
        out.print(*plan_report.candidate_lines(candidates), *plan_report.lines(found, bound), sep="\n", highlight=False)
    return 0 if found.fits else 1


def _planned_job(options: argparse.Namespace, setting: "Setting") -> "Job":
    from ptf.compute.device_defaults import settled
    from ptf.run import resolved

    keys = [f"{key}={value}" for key, value in setting.keys.items()]
    return settled(resolved(_job(options, *keys, f"compute.workers={setting.gpus}", "compute.launcher=ray")), gpu=True)


def _plan(options: argparse.Namespace, setting: "Setting") -> "tuple[Budget | OnlineBudget, Roofline | None]":
    """Return the budget of the job with a setting, and with `--roofline` the bound of its MFU."""
    from ptf.rl.online_budget import online_budget
    from ptf.train.budget import budget, config_directory
    from ptf.train.roofline import roofline

    job = _planned_job(options, setting)
    directory = config_directory(job.model.path)
    bound = roofline(job, directory, setting.gpus, options.gpu_type) if options.roofline else None
    mfu = bound.mfu if bound else options.mfu
    counted = online_budget if job.rollout else budget
    return counted(job, directory, setting.gpus, room_gib=options.gpu_memory_gib, mfu=mfu, gpu=options.gpu_type), bound


def inspect(options: argparse.Namespace) -> int:
    """Print the data as training will see it. Returns 1 where a row is bad and none may be skipped: training would
    stop there."""
    with only_ours(options.json) as out:
        try:
            job = _job(options)
            from ptf.inspection import report, terminal

            inspected = ptf.inspect(job, rows=options.rows, samples=options.samples)
        except UserError as error:
            if not options.json:
                raise
            from ptf.inspection.report import errors_as_json

            out.write(errors_as_json(error) + "\n")
            return 2
        if options.html:
            write_page(options, lambda screen: terminal.show(inspected, screen))
        if options.json:
            out.write(json.dumps(report.as_dict(inspected), ensure_ascii=False) + "\n")
        elif options.html:
            print(f"inspect: written to {options.html}")
        else:
            terminal.show(inspected, console(width=180, highlight=False))
    return 1 if any(source.bad for source in inspected.survey.sources) and not job.data.max_bad_rows_share else 0


def write_page(options: argparse.Namespace, show: "Callable[[Console], None]") -> None:
    """Write what `show` prints on a terminal into the file `--html`, as one page that loads nothing."""
    screen = console(io.StringIO(), width=180, highlight=False, record=True, force_terminal=True)
    screen.print(f"{' '.join(options.config)}\n", style="bold", markup=False)
    show(screen)
    storage.write_text(options.html, screen.export_html(code_format=PAGE))


@contextlib.contextmanager
def only_ours(alone: bool) -> Iterator[TextIO]:
    """Yield standard output. Where it must hold one object `alone`, everything else that this process and its children
    write there goes to standard error instead."""
    if not alone:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def try_episodes(options: argparse.Namespace) -> int:
    """Play episodes of a job without training and show them. Returns 1 if none of them has a result."""
    with only_ours(True) as out:
        job = ptf.load(options.config, options.set)
        from ptf.episode_preview import report, terminal

        preview = ptf.try_episodes(job, options.episodes, policy=options.policy)
        if options.html:
            write_page(options, lambda screen: terminal.show(preview, screen))
        if options.json:
            out.write(json.dumps(report.as_dict(preview), ensure_ascii=False, default=str) + "\n")
        else:
            terminal.show(preview, console(out, width=120, highlight=False), conversations=not options.html)
            if options.html:
                out.write(f"try: written to {options.html}\n")
    return 0 if preview.has_result else 1


def verify(options: argparse.Namespace) -> int:
    """Compare a model family, or a checkpoint, with transformers."""
    from rich.progress import track

    from ptf.model import verify as verifier

    if (Path(options.where) / "config.json").is_file():
        return _print_cases(options.where, [verifier.Reference(Path(options.where)).compare()], options.json)
    progress = console(sys.stderr)
    cases = list(
        track(
            verifier.verify(options.where, options.configs, options.seed),
            f"verify {options.where}",
            options.configs,
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )
    )
    if options.parallel:
        from ptf.model.parallel_parity import verify_parallel

        cases += verify_parallel(options.where, min(options.configs, 2), options.seed)
    return _print_cases(options.where, cases, options.json)


def _print_cases(model: str, cases: "list[Case]", as_json: bool) -> int:
    from rich.box import SIMPLE
    from rich.table import Table

    passed = bool(cases) and all(case.passed for case in cases)
    if as_json:
        found = {"model": model, "cases": [asdict(case) for case in cases], "passed": passed}
        sys.stdout.write(json.dumps(found) + "\n")
        return 0 if passed else 1
    table = Table("", "compared", "error of transformers", "error of ptf", "tolerance", "verdict", box=SIMPLE)
    lines = []
    for number, case in enumerate(cases):
        for found in case.findings:
            errors = (f"{n:.1e}" for n in (found.theirs, found.ours, found.tolerance))
            cells = case.mesh or str(number), found.what, *errors, f"{found.verdict} {found.place}".strip()
            table.add_row(*cells, style=None if found.passed else "red")
        more = [f"and {len(case.problems) - 5} more (--json has all)"] if len(case.problems) > 5 else []
        lines += [f"{case.mesh or number}: {line}" for line in (*case.problems[:5], *more, *case.notes)]
    console(width=180, markup=False, highlight=False).print(table, *lines, sep="\n")
    verdict, style = ("pass", "green") if passed else ("fail", "red")
    console().print(f"{model}: {verdict}", style=style, markup=False, highlight=False, soft_wrap=True)
    return 0 if passed else 1


def check_engine(options: argparse.Namespace) -> int:
    """Print whether a rollout engine does what training relies on."""
    from rich.markup import escape

    from ptf.rl.engines.conformance import ConformanceSuite, make_of

    with tempfile.TemporaryDirectory() as place:
        wrong = 0
        for finding in ConformanceSuite(
            make_of(options.where, options.arg, options.precision, Path(place)), Path(place), options.precision
        ).findings():
            wrong += finding.wrong is not None
            mark = "[red]WRONG[/]" if finding.wrong else "[yellow]skip [/]" if finding.refused else "[green]ok   [/]"
            more = (
                f": {finding.wrong}"
                if finding.wrong
                else ": not supported by this engine, which refuses it, as it should"
                if finding.refused
                else ""
            )
            console(width=200).print(mark, escape(finding.what + more), highlight=False, soft_wrap=True)
    print(f"{options.where}: " + ("all checks passed" if not wrong else f"{wrong} checks failed"))
    return 1 if wrong else 0


def chat(options: argparse.Namespace) -> int:
    """Answer lines of a person, or of a pipe."""
    settings = ("system", "max_new_tokens", "temperature", "top_p", "seed")
    talk = ptf.chat(_served(options.where), **{name: getattr(options, name) for name in settings})
    person = sys.stdin.isatty()
    if person:
        print("/new forgets what was said; Ctrl-D ends")
    while True:
        try:
            text = input("> " if person else "").strip()
            if text == "/new":
                talk.forget()
            elif text:
                print(talk.answer(text), flush=True)
        except (EOFError, KeyboardInterrupt):
            return 0
        except UserError as error:
            fail(error)
            if not person:
                return 2


def serve(options: argparse.Namespace) -> int:
    """Serve a model until a signal ends it."""
    from ptf.serving.options import ServingOptions

    key = os.environ.get(options.api_key_env or "")
    if options.api_key_env is not None and not key:
        raise UserError(f"--api-key-env: the environment variable {options.api_key_env} is not set")
    where = _served(options.where)
    names = ("engine", "max_length", "max_new_tokens", "max_running", "catalogue", "beam")
    serving = ServingOptions(**{name: value for name in names if (value := getattr(options, name)) is not None})
    with contextlib.suppress(KeyboardInterrupt):  # while the model is loaded
        ptf.serve(where, host=options.host, port=options.port, api_key=key, name=options.name, options=serving)
    return 0


def _served(where: str) -> "Job | str":
    """Return the job of a YAML, whose published version is meant; any other place as it is."""
    from ptf.config import load

    return load(where) if where.endswith((".yaml", ".yml")) else where


def publish(options: argparse.Namespace) -> int:
    """Publish a run, list what is published, or go back to an earlier version."""
    from ptf.config import load
    from ptf.storage import published_versions

    root = options.where.rstrip("/") or "/"
    if not options.list and options.rollback is None:
        if not (Path(root) / JOB).is_file():
            raise UserError(
                f"{options.where} is not the directory of a training run: it has no {JOB}. ptf publish RUN publishes a "
                "run; --list and --rollback take a job's YAML or the directory of versions"
            )
        ptf.publish(root, overrides=options.set)
        return 0
    if root.endswith((".yaml", ".yml")):
        root = load(root, overrides=options.set).versions
    if options.rollback is not None:
        pointer = published_versions.roll_back(root, options.rollback or None)
        print(f"{root}: {pointer.version} is what is published now")
        return 0
    now, versions = published_versions.pointer(root), list[str]()
    with contextlib.suppress(storage.Missing):  # before the first one, the directory is not there
        versions = published_versions.versions(root)
    for version in versions:
        print(f"{'→' if now and version == now.version else ' '} {version}")
    if now is None:
        raise UserError(f"nothing is published in {root}")
    return 0


def _number(low: float, high: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            whole, bounds = ("whole " if kind is int else ""), f" to {high:g}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a {whole}number from {low:g}{bounds}")
        return value

    return read


MANUAL = """
check: report everything that is wrong with a config, or print it whole
  CONFIG: YAML file; several are merged left to right
  --set A.B=VALUE: override one key; may be repeated
  --dry-run: train one step on a tiny model of the same family, in this process, to check data, loss masks and reward,
    and that output directories can be written
  --skip-paths: do not look for data files, model directories and programs: they are on other machines, or another job
    makes them
doctor: versions, devices and limits of this machine, and what is wrong
train: train
  CONFIG: YAML file; several are merged left to right
  --set A.B=VALUE: override one key; may be repeated
  | --run-name NAME: name of the run; a run of this name is continued
  | --continue NAME: continue the run of this name; refused if there is none
replay: repeat a run from its recorded rollout schedule and check that weights and metrics are bit-identical
  RUN: the directory of a run
  --run-name NAME: name of the new run; default: the run's, and -replay
evaluate: evaluate a run, or any model, on a config's held-out data
  RUN_OR_MODEL: the directory of a run; with --config a directory, a URI or a Hugging Face id of a model
  --config CONFIG: config whose held-out data is used for a model; a run uses its own
  --set A.B=VALUE: override one key; may be repeated
plan: memory, FLOPs and time of a step on N GPUs, from the model's config.json alone
  CONFIG: YAML file; several are merged left to right
  --set A.B=VALUE: override one key; may be repeated
  --workers N: number of training processes, one per GPU; other pools of an online job add theirs (default: the
    config's compute.workers)
  --gpu-memory-gib GIB: memory of each GPU in GiB (default: 80)
  --mfu SHARE: share of the peak FLOP/s that is reached (default: 0.4)
  --gpu-type TYPE: type of GPU, which sets the peak FLOP/s (default: H100)
  --roofline: the upper bound of MFU by operator, and the time of a step from it
  --fit: search activation checkpointing, micro-batch size, optimizer offload, tensor and context parallelism and
    number of GPUs for a setting that fits; say why others do not
  --json: print the plan as JSON
inspect: look at the data as training will see it: samples, lengths, packing, mixture, what is bad
  CONFIG: YAML file; several are merged left to right
  --set A.B=VALUE: override one key; may be repeated
  --rows N: rows of each source to look at (default: all, or 2,000 of each if the sources have more than 100,000)
  --samples N: show the first N samples of each source (default: 1)
  --json: print one JSON object and nothing else
  --html FILE: write one self-contained page
try: play episodes of an online job without training: conversations, rewards, times, whether the same seed reproduces
    the same episode
  CONFIG: YAML file; several are merged left to right
  --set A.B=VALUE: override one key; may be repeated
  --episodes K: how many (default: 8)
  --policy POLICY: echo (the last user message, repeated), empty, a file of responses (a line for each episode; in
    .jsonl a line is a string, or a list of strings by turn), or a model: a directory, a run, a URI, a Hugging Face id,
    a job's YAML (default: the model that the job begins with, or echo if its weights are not on this machine)
  --json: print one JSON object and nothing else
  --html FILE: write the episodes as one self-contained page
check-model: compare a model family, or a checkpoint, with transformers: logits, gradients, tensors
  FAMILY_OR_DIR: a model_type (random configs of it), or a directory with config.json and safetensors, whose weights are
    compared in fp64, fp32 and bf16
  --configs N: random configs of a family (default: 12)
  --seed S: seed of the random configs (default: 0)
  --parallel: also run 2 configs of a family on two processes, with FSDP and with tensor parallelism, and load what they
    save with transformers (about 10 seconds; default: on)
  --json: print one JSON object, with every config, and nothing else
check-engine: whether a rollout engine does what training relies on: log-probs, seeds, stops, weight syncs
  ENGINE: native, vllm, or pkg.mod:Engine
  --arg KEY=VALUE: an argument of it; may be repeated
  --precision: default: fp32
chat: talk to a checkpoint; lines from a pipe are answered one by one
  MODEL: a directory, a directory of versions, a URI, a Hugging Face id, or a job's YAML: what its flow published
  --system TEXT: a system message
  --max-new-tokens N: longest response (default: 256, or what the model can still read)
  --temperature T: 0 takes the likeliest token (default: 0.7)
  --top-p P: draw from the likeliest tokens that together have this probability
  --seed S: seed of the sampling (default: 0)
serve: serve a model at an address with OpenAI's API: responses, or scores or rankings, by its head
  CONFIG_OR_RUN_OR_MODEL: a job's YAML (what its flow published), the directory of a run, or a directory, a directory of
    versions, a URI or a Hugging Face id of a model or of an adapter
  --port N: 0 takes any free port (default: 8000)
  --host ADDRESS: address to listen on (default: 127.0.0.1, which only this machine reaches); others need --api-key-env
  --api-key-env NAME: the environment variable with the key that clients must send
  --name NAME: the model's name for clients (default: that of its directory, or of the job's output)
  --engine: what samples responses (default: native)
  --max-length N: most tokens of a context with its response (default: what the model can read, at most 8192)
  --max-new-tokens N: longest response to a request that gives no limit (default: 1024)
  --max-running N: responses that the native engine samples at a time; others wait (default: 128)
  --catalogue FILE: catalogue.json of ptf.events.prepare, whose items are ranked (default: that of the run's
    evaluate.ranking)
  --beam N: beginnings of items that are kept on each level (default: 100)
publish: publish a trained run; list what is published, or go back
  RUN_OR_PLACE: the directory of a run; for --list and --rollback a job's YAML, or the directory or URI of versions
  --set A.B=VALUE: override one key that may change after training, like publish.gate=off; may be repeated
  | --list: all versions, with an arrow before the current one
  | --rollback VERSION: point latest.json back to VERSION (default: the version before the current one)
"""
REPEATED = {"action": "append", "default": []}
SETTINGS: dict[str, dict[str, Any]] = {  # of arguments for which there is more to say
    "CONFIG": {"nargs": "+"},
    "--set": REPEATED,
    "--continue": {"dest": "continued"},
    "--config": {"nargs": "+"},
    "--gpu-memory-gib": {"type": _number(0.001, 1e6), "default": 80.0},
    "--mfu": {"type": _number(0.001, 1), "default": 0.4},
    "--gpu-type": {"default": "H100"},
    "--samples": {"type": _number(0, math.inf, int), "default": 1},
    "--episodes": {"default": 8},
    "--configs": {"default": 12},
    "--seed": {"type": int, "default": 0},
    "--parallel": {"action": argparse.BooleanOptionalAction, "default": True},
    "--arg": REPEATED,
    "--precision": {"choices": ["fp32", "bf16"], "default": "fp32"},
    "--temperature": {"type": _number(0, 10), "default": 0.7},
    "--top-p": {"type": _number(0.001, 1), "default": 1.0},
    "--port": {"type": _number(0, math.inf, int), "default": 8000},
    "--host": {"default": "127.0.0.1"},
    "--engine": {"choices": ["native", "vllm"]},
    "--rollback": {"nargs": "?", "const": ""},
}
RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "check": check,
    "doctor": doctor,
    "train": train,
    "replay": replay,
    "evaluate": evaluate,
    "plan": plan,
    "inspect": inspect,
    "try": try_episodes,
    "check-model": verify,
    "check-engine": check_engine,
    "chat": chat,
    "serve": serve,
    "publish": publish,
}


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `MANUAL`: a line for each command, and an indented one for each of its arguments.

    Of options that begin with `|` only one may be given. A line that is indented further continues the one before.
    """
    parser = argparse.ArgumentParser(prog="ptf", description="Post-training of large language models from one YAML.")
    parser.add_argument("--version", action="version", version=f"ptf {ptf.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command, one_of = parser, None
    for line in MANUAL.replace("\n    ", " ").strip().splitlines():
        written, _, text = line.strip().partition(": ")
        if not line.startswith(" "):
            command, one_of = commands.add_parser(written, help=text), None
            command.set_defaults(run=RUNS[written])
            continue
        name, _, metavar = written.removeprefix("| ").partition(" ")
        settings: dict[str, Any] = {
            "metavar": metavar or None,
            "help": text,
            "type": _number(1, math.inf, int) if metavar in ("N", "K") else str,
            **SETTINGS.get(name, {}),
        }
        if not name.startswith("-"):
            settings["metavar"] = name
            command.add_argument(dest="config" if name == "CONFIG" else "where", **settings)
            continue
        if not metavar and name not in SETTINGS:
            settings = {"action": "store_true", "help": text}
        if written.startswith("|"):
            one_of = one_of or command.add_mutually_exclusive_group()
            one_of.add_argument(name, **settings)
        else:
            command.add_argument(name, **settings)
    return parser


if __name__ == "__main__":
    sys.exit(main())
