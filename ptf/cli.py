"""The console script `ptf`: check a config, train, verify a model. No torch until something needs it; rich lives here only.

The one idea: what the user can mend (`UserError`) is one message and exit status 2; everything else is a bug of ours and keeps its traceback.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ptf.config import dump, load
from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.model.verify import Report
    from ptf.train.budget import Budget


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 verified and found to differ, or planned and found not to fit, 2 refused with one message."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except UserError as error:
        return fail(error)


def fail(error: UserError) -> int:
    Console(stderr=True).print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def check(options: argparse.Namespace) -> int:
    text = dump(load(*options.config, overrides=options.set))
    if sys.stdout.isatty():
        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        sys.stdout.write(text)
    return 0


def train(options: argparse.Namespace) -> int:
    job = load(*options.config, overrides=options.set)
    from ptf.run import main_train

    return main_train(job, options.lineage)


def plan(options: argparse.Namespace) -> int:
    job = load(*options.config, overrides=[*options.set, f"compute.workers={options.gpus}", "compute.launcher=ray"])
    from ptf.run import resolved
    from ptf.train.budget import budget, described

    job = resolved(job)
    directory = described(job.model.path, job.model.revision)
    found = budget(job, directory, options.gpus, room_gib=options.memory, mfu=options.mfu, gpu=options.gpu)
    Console(width=None if sys.stdout.isatty() else 180).print(_planned(found), *_judged(found), sep="\n", highlight=False)
    return 0 if found.fits else 1


def _planned(found: "Budget") -> Table:
    """Memory of the fullest GPU, line by line."""
    gib = lambda n: f"{n / 2**30:.2f}"  # noqa: E731
    memory = found.memory
    lines = {
        "weights (fp32 shard)": memory.weights, "gradients (fp32 shard)": memory.gradients, "optimizer (AdamW)": memory.optimizer,
        "gathered blocks": memory.gathered, f"activations ({found.micro_rows} rows at a time)": memory.activations, "logits and head": memory.logits,
    }  # fmt: skip
    table = Table("GiB on each GPU", "", box=SIMPLE, title=f"{found.model}: {found.parameters:,} parameters, {found.trained:,} trained")
    table.columns[1].justify = "right"
    for name, value in lines.items():
        table.add_row(name, gib(value))
    table.add_section()
    table.add_row("total", f"{gib(memory.total)} of {gib(found.room)}", style=None if found.fits else "red")
    return table


def _judged(found: "Budget") -> list[str]:
    """What a step costs, and, if it does not fit, what takes most and what to change."""
    mesh = " × ".join(f"{name} {size}" for name, size in found.mesh.items())
    rate = found.tokens / found.seconds
    lines = [f"{found.gpus} GPUs ({mesh}): {found.flops:.3g} FLOPs and {found.tokens:,} tokens a step; {found.seconds:.3g} s, {rate:,.0f} tokens/s"]
    if not found.fits:
        lines.append(f"does not fit: {found.memory.largest} take most. Change:")
        lines += [f"  {what}  → {total / 2**30:.2f} GiB" for what, total in found.advice]
    return lines


def verify(options: argparse.Namespace) -> int:
    from ptf.model.verify import as_json
    from ptf.model.verify import verify as compare

    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"verify {options.model}", total=1 if Path(options.model).is_dir() else options.configs)
        report = compare(options.model, options.configs, options.seed, progress=lambda case: bar.advance(task))
    if options.json:
        sys.stdout.write(as_json(report) + "\n")
    else:
        out = Console(width=None if sys.stdout.isatty() else 180)
        out.print(_verified(report))
        out.print(f"{report.model}: {'pass' if report.passed else 'fail'}", style="green" if report.passed else "red", markup=False, highlight=False)
    return 0 if report.passed else 1


def _verified(report: "Report") -> Table:
    """A row for each config; errors are relative to the largest magnitude of the reference."""
    table = Table("config", "logit error", "gradient error", "worst tensor", "first diverging place", "problems", box=SIMPLE)
    number = lambda error: f"{error:.1e}" if math.isfinite(error) else "–"  # noqa: E731
    for i, case in enumerate(report.cases):
        shown = [*case.problems[:5], *([f"and {len(case.problems) - 5} more (--json has all)"] if len(case.problems) > 5 else [])]
        cells = [str(i), number(case.logits), number(case.gradients), case.worst_gradient, case.diverges, "\n".join(shown)]
        table.add_row(*map(Text, cells), style=None if case.passed else "red")
    return table


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ptf", description="Post-training of large language models from one YAML.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config = argparse.ArgumentParser(add_help=False)
    config.add_argument("config", nargs="+", metavar="CONFIG", help="YAML file; several are merged left to right")
    config.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override one key; may be repeated")

    one = commands.add_parser("check", parents=[config], help="report everything that is wrong with a config, or print it whole")
    one.set_defaults(run=check)
    one = commands.add_parser("train", parents=[config], help="train")
    one.add_argument("--lineage", metavar="ID", help="the training run to continue, or the name of a new one")
    one.set_defaults(run=train)
    one = commands.add_parser("plan", parents=[config], help="memory, FLOPs and time of a step on N GPUs, from the model's config.json alone")
    one.add_argument("--gpus", type=_positive, required=True, metavar="N", help="how many (compute.workers)")
    one.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="memory of one (default: 80)")
    one.add_argument("--mfu", type=float, default=0.4, metavar="SHARE", help="share of the peak FLOP/s that is reached (default: 0.4)")
    one.add_argument("--gpu", default="H100", help="whose peak (default: H100)")
    one.set_defaults(run=plan)
    one = commands.add_parser("verify", help="compare a model family, or a checkpoint, with transformers: logits, gradients, tensors")
    one.add_argument("model", metavar="FAMILY_OR_DIR", help="a model_type (random configs of it), or a directory with config.json and safetensors")
    one.add_argument("--configs", type=_positive, default=12, metavar="N", help="random configs of a family (default: 12)")
    one.add_argument("--seed", type=int, default=0, metavar="S", help="which random configs (default: 0)")
    one.add_argument("--json", action="store_true", help="print one JSON object, with every config, and nothing else")
    one.set_defaults(run=verify)
    return parser
