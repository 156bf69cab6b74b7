"""The console script `ptf`: check a config, train, verify a model. No torch until something needs it; rich lives here only.

The one idea: what the user can mend (`UserError`) is one message and exit status 2; everything else is a bug of ours and keeps its traceback.
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ptf.config import dump, load
from ptf.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from ptf.config import Job
    from ptf.data.sample import Sample
    from ptf.data.survey import Survey
    from ptf.data.tokenizer import Tokenizer
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
    job = load(*options.config, overrides=options.set)
    if options.dry_run:
        from ptf.rehearse import rehearse

        rehearse(job, lambda line: print(line, flush=True))
        return 0
    text = dump(job)
    if sys.stdout.isatty():
        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        sys.stdout.write(text)
    return 0


def doctor(options: argparse.Namespace) -> int:
    from ptf.doctor import findings

    table = Table("", "", "what is off", box=SIMPLE)
    for found in findings():
        table.add_row(*map(Text, found), style="yellow" if found.problem else None)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
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


def inspect(options: argparse.Namespace) -> int:
    job = load(*options.config, overrides=options.set)
    from ptf.run import surveyed

    found, tokenizer = surveyed(job, options.rows, options.samples)
    width = None if sys.stdout.isatty() else 180
    console = Console(width=width, highlight=False)
    console.print(_sources(found), *_histogram(found), *_epoch(job, found), sep="\n", markup=False)
    for source in found.sources:
        for bad in source.bad:
            console.print(f"bad row: {bad.where} (source {source.name}): {bad.reason}", style="red", markup=False)
        for where, atom in source.examples:
            console.print(f"\n{source.name}, {where}: {sum(map(len, atom))} tokens; trained is {'green' if console.is_terminal else 'in ⟦ ⟧'}", style="bold")
            for sample in atom:
                console.print(_coloured(sample, tokenizer, console.is_terminal), soft_wrap=True)
    return 1 if any(source.bad for source in found.sources) and job.data.on_bad_row == "error" else 0


def _sources(found: "Survey") -> Table:
    columns = "rows looked at", "samples", "tokens", "trained", "expansion", "p50", "p99", "max", "dropped", "cut", "bad", "share of samples", "of tokens"
    table = Table("source", "kind", *columns, box=SIMPLE)
    for column in table.columns[2:]:
        column.justify = "right"
    for s in found.sources:
        p50, p99, most = _percentiles(s.lengths)
        c = s.counts
        rows = f"{c['rows']:,}" if s.whole else f"{c['rows']:,} of about {s.rows:,.0f}"
        samples, tokens = found.shares[s.name]
        cells = [rows, f"{c['samples']:,}", f"{c['tokens']:,}", f"{c['trained'] / max(1, c['tokens']):.0%}", f"×{s.expansion:.3g}", p50, p99, most]
        table.add_row(s.name, s.kind, *cells, *(f"{c[name]:,}" for name in ("dropped", "truncated", "bad")), f"{samples:.1%}", f"{tokens:.1%}")
    return table


def _percentiles(lengths: "np.ndarray") -> list[str]:
    """Median, 99th percentile and largest, as text."""
    import numpy as np

    return [f"{n:,.0f}" for n in np.percentile(lengths, [50, 99, 100])] if len(lengths) else ["–"] * 3


def _histogram(found: "Survey") -> list[str]:
    """Samples by length, in powers of two."""
    bins = Counter(int(n).bit_length() for s in found.sources for n in s.lengths)
    if not bins:
        return ["no sample to train on"]
    most = max(bins.values())
    lines = [f"{2 ** (b - 1):>9,} – {2**b - 1:>9,} {bins[b]:>8,} {'█' * max(bins[b] > 0, round(50 * bins[b] / most))}" for b in range(min(bins), max(bins) + 1)]
    longest = sorted(((n, where, s.name) for s in found.sources for n, where in s.longest), reverse=True)[:3]
    return ["tokens in a sample", *lines, *(f"longest: {n:,} tokens, {where} (source {name})" for n, where, name in longest), ""]


def _epoch(job: "Job", found: "Survey") -> list[str]:
    about = "" if all(s.whole for s in found.sources) else "about "
    lines = [f"an epoch of all sources: {about}{found.tokens:,.0f} tokens"]
    if not job.rollout:
        lines[0] += (
            f", {about}{found.steps:,.1f} steps of {job.train.rows} rows × {job.data.seq_len} tokens, "
            f"{found.fill:.2%} full with {found.documents:.1f} documents a row"
        )
    if found.planned:
        lines.append(f"the run as configured: {found.planned.said()}")
    lines += [f"source {name} is read {order}" for name, order in found.orders.items() if "blocks" not in order]
    return lines


def _coloured(sample: "Sample", tokenizer: "Tokenizer", colours: bool) -> Text:
    """The text of a sample, with what is trained marked."""
    out = Text()
    on = sample.weights > 0
    changes = ((on[1:] != on[:-1]).nonzero()[0] + 1).tolist()
    for start, end in pairwise([0, *changes, len(sample)]):
        text = tokenizer.decode(sample.tokens[start:end])
        out.append(text if colours or not on[start] else f"⟦{text}⟧", style="black on green" if on[start] else "dim")
    return out


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


def check_engine(options: argparse.Namespace) -> int:
    from ptf.rl.contract import Contract, make_of

    with tempfile.TemporaryDirectory() as place:
        wrong = 0
        for finding in Contract(make_of(options.engine, options.arg, options.precision, Path(place)), Path(place), options.precision).findings():
            wrong += finding.wrong is not None
            mark = "[red]WRONG[/]" if finding.wrong else "[yellow]no   [/]" if finding.refused else "[green]ok   [/]"
            more = f": {finding.wrong}" if finding.wrong else ": it refuses, and says so" if finding.refused else ""
            Console(width=200).print(mark, escape(finding.what + more), highlight=False, soft_wrap=True)
    print(f"{options.engine}: " + ("it will do" if not wrong else f"{wrong} things are wrong"))
    return 1 if wrong else 0


def chat(options: argparse.Namespace) -> int:
    from ptf.chat import Chat

    where = load(options.where).versions if options.where.endswith((".yaml", ".yml")) else options.where
    talk = Chat(
        where, system=options.system, max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed,
    )  # fmt: skip
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


def publish(options: argparse.Namespace) -> int:
    from ptf import published

    root = options.where.rstrip("/") or "/"
    if root.endswith((".yaml", ".yml")):
        job = load(root)
        root = job.versions
    if options.rollback is not None:
        found = published.roll_back(root, options.rollback or None)
        print(f"{root}: {found.version} is what is published now")
        return 0
    now = published.pointer(root)
    for version in published.versions(root):
        print(f"{'→' if now and version == now.version else ' '} {version}")
    if now is None:
        raise UserError(f"nothing is published in {root}")
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ptf", description="Post-training of large language models from one YAML.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config = argparse.ArgumentParser(add_help=False)
    config.add_argument("config", nargs="+", metavar="CONFIG", help="YAML file; several are merged left to right")
    config.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override one key; may be repeated")

    one = commands.add_parser("check", parents=[config], help="report everything that is wrong with a config, or print it whole")
    one.add_argument(
        "--dry-run", action="store_true", help="train one step of it on a tiny model of the same family, in this process: data, masks, reward, places"
    )
    one.set_defaults(run=check)
    one = commands.add_parser("doctor", help="versions, devices and limits of this machine, and what is off")
    one.set_defaults(run=doctor)
    one = commands.add_parser("train", parents=[config], help="train")
    one.add_argument("--lineage", metavar="ID", help="the training run to continue, or the name of a new one")
    one.set_defaults(run=train)
    one = commands.add_parser("plan", parents=[config], help="memory, FLOPs and time of a step on N GPUs, from the model's config.json alone")
    one.add_argument("--gpus", type=_positive, required=True, metavar="N", help="how many (compute.workers)")
    one.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="memory of one (default: 80)")
    one.add_argument("--mfu", type=float, default=0.4, metavar="SHARE", help="share of the peak FLOP/s that is reached (default: 0.4)")
    one.add_argument("--gpu", default="H100", help="whose peak (default: H100)")
    one.set_defaults(run=plan)
    one = commands.add_parser("inspect", parents=[config], help="look at the data as training will see it: samples, lengths, packing, mixture, what is bad")
    one.add_argument("--rows", type=_positive, default=2000, metavar="N", help="rows of each source to look at (default: 2000)")
    one.add_argument("--samples", type=int, default=1, metavar="K", help="samples of each source to print (default: 1)")
    one.set_defaults(run=inspect)
    one = commands.add_parser("verify", help="compare a model family, or a checkpoint, with transformers: logits, gradients, tensors")
    one.add_argument("model", metavar="FAMILY_OR_DIR", help="a model_type (random configs of it), or a directory with config.json and safetensors")
    one.add_argument("--configs", type=_positive, default=12, metavar="N", help="random configs of a family (default: 12)")
    one.add_argument("--seed", type=int, default=0, metavar="S", help="which random configs (default: 0)")
    one.add_argument("--json", action="store_true", help="print one JSON object, with every config, and nothing else")
    one.set_defaults(run=verify)
    one = commands.add_parser("check-engine", help="whether a rollout engine does what training relies on: log-probs, seeds, stops, weight syncs")
    one.add_argument("engine", metavar="ENGINE", help="native, vllm, or pkg.mod:Engine")
    one.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="an argument of it; may be repeated")
    one.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    one.set_defaults(run=check_engine)
    one = commands.add_parser("chat", help="talk to a checkpoint; lines from a pipe are answered one by one")
    one.add_argument("where", metavar="MODEL", help="a directory, a directory of versions, a URI, a Hugging Face id, or a job's YAML: what its flow published")
    one.add_argument("--system", metavar="TEXT", help="a system message")
    one.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N", help="longest answer (default: 256)")
    one.add_argument("--temperature", type=_number(0, 10), default=0.7, metavar="T", help="0 takes the likeliest token (default: 0.7)")
    one.add_argument("--top-p", type=_number(0.001, 1), default=1.0, metavar="P", help="draw from the likeliest tokens that together have this probability")
    one.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn (default: 0)")
    one.set_defaults(run=chat)
    one = commands.add_parser("publish", help="the versions that a job's flow has published, and back to an earlier one")
    one.add_argument("where", metavar="CONFIG_OR_PLACE", help="a job's YAML, or the directory or URI of versions (publish.to)")
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="all versions, with an arrow before the one that counts")
    what.add_argument("--rollback", nargs="?", const="", metavar="VERSION", help="let the one before count again, or this one")
    one.set_defaults(run=publish)
    return parser


if __name__ == "__main__":
    sys.exit(main())
