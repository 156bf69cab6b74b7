"""The command lines of benchmarks: their options, and the processes that they start."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-peers" / "bin" / "python"


def options(about: str | None, **known: Any) -> argparse.Namespace:
    """The options of this process: one for each keyword, whose value is its default, or a default and a help.

    False stands for a flag, None for a whole number, a list or the keys of a table for some of its words, an empty list
    for whole numbers.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in known.items():
        default, told = value if isinstance(value, tuple) else (value, None)
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true", help=told)
        elif isinstance(default, list | Mapping):
            words = list(default)
            named = bool(words) and isinstance(words[0], str)
            kind, choices = (str, words) if named else (int, None)
            parser.add_argument(option, nargs="*", type=kind, default=words, choices=choices, help=told)
        else:
            kind = int if default is None else type(default)
            parser.add_argument(option, type=kind, default=default, help=told)
    return parser.parse_args()


def last_line(command: Sequence[str], name: str, **environment: str) -> Any:
    """The JSON value of the last line that a command prints, run in the repository; exits with what it said if it
    fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def need_peer() -> None:
    """Exit where the peers' environment is missing."""
    if not PEER.exists():
        sys.exit(f"{sys.argv[0]} needs the peer's environment: make peers")
