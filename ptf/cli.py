"""The console script `ptf`: check a config, train. No torch until something trains; rich lives here only.

The one idea: what the user can mend (`UserError`) is one message and exit status 2; everything else is a bug of ours and keeps its traceback.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.syntax import Syntax

from ptf.config import dump, load
from ptf.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused with one message."""
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
    return parser
