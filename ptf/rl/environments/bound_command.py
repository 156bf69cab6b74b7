"""The program that runs a command in a process group of its own and ends the whole group when its parent ends, or when
the command ends: `python bound_command.py PARENT COMMAND…`, with the parent's process id.

It is run as a file and imports nothing of ptf, because the command may need another Python path.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; elsewhere, the command has to notice that its stdin was closed


def end_group(*_: object) -> None:
    """Kill this process and all that the command has started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(parent: int, command: list[str]) -> None:
    """Run the command to its end."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end_group()
    try:
        subprocess.call(command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
    end_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
