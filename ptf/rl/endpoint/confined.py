"""How the user's programs are started: so that they end with all that they have started (`confined_command`), and those
of a harness with few environment variables."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ptf.rl.endpoint import confined_command
from ptf.rl.loopback import unproxied

ALWAYS = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")  # environment variables that every program gets
CONFINED = str(Path(confined_command.__file__))
ENDS_WITHIN_S = 5.0  # after it was told to


class HarnessFault(Exception):
    """A harness failed."""


class ProcessEnded(Exception):
    """The process of several episodes ended, perhaps through another episode's fault."""


def confined(command: Sequence[str], place: str = "") -> list[str]:
    """Return the command line that runs a command by `confined_command`; `place` is the command's directory. Without
    one the command is not confined, and only ends with this process."""
    return [sys.executable, "-I", "-S", CONFINED, str(os.getpid()), place, *command]


def variables(names: Sequence[str], place: str) -> dict[str, str]:
    """Return the environment variables of a program: those of `ALWAYS` and `names`, its directory as HOME and TMPDIR,
    and those with which it reaches the endpoint without a proxy."""
    given = {n: os.environ[n] for n in (*ALWAYS, *names) if n in os.environ}
    return {**given, **unproxied(os.environ), "HOME": place, "TMPDIR": place}
