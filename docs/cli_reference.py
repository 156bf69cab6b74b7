"""Write docs/cli.md from the parser of the command `ptf`: `python docs/cli_reference.py`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ptf import cli

HEAD = """# Command line

Written from `ptf/cli.py` by `python docs/cli_reference.py`; do not edit.

`ptf COMMAND --help` prints the same. Exit status 0: success. 1: the command ran and found a problem (`check-model`,
`inspect`, `check-engine`, `try`), or the job does not fit (`plan`). 2: it stopped with one message that says what to
do: an invalid input, a run in use, a request to stop (the checkpoint is written), or a failure that a retry may cure,
such as a rank that died or a cluster that does not answer. Any other failure ends with a traceback and status 1.
"""


def markdown() -> str:
    """The page: a section a command, a row an argument."""
    return HEAD + "".join(f"\n{part}" for part in sections(cli._parser()))


def sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A section of markdown for each command."""
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    purposes = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        rows = [row(action) for action in command._actions if not isinstance(action, argparse._HelpAction)]
        table = "\n".join(["| argument | |", "|---|---|", *rows])
        yield f"## ptf {name}\n\n{purposes[name][:1].upper()}{purposes[name][1:]}.\n" + (f"\n{table}\n" if rows else "")


def row(action: argparse.Action) -> str:
    """One argument: how it is written, and its help."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    if not action.option_strings:
        written = f"{value}" + (" …" if action.nargs == "+" else "")
    elif action.nargs == 0:
        written = ", ".join(action.option_strings)
    else:
        written = f"{', '.join(action.option_strings)} " + (f"[{value}]" if action.nargs == "?" else f"{value}")
    return f"| `{written}` | {(action.help or '').replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    (Path(__file__).parent / "cli.md").write_text(markdown())
