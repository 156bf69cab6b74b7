"""The processes of a flow's run: none of them outlives the run, even if a process is killed.

On SIGTERM or Ctrl-C the run sends SIGTERM to its tasks, which clean up (`finally`, Ray's shutdown, child processes)
within the 5 s that Metaflow allows; then Metaflow kills the remaining ones. If the run itself is killed with SIGKILL,
the kernel kills its tasks.
"""

import os
import signal
from pathlib import Path
from types import FrameType

from ptf.workspace.entry import end_with_parent

RUN = "PTF_RUN_PID"
ENDS = (signal.SIGTERM, signal.SIGINT)


def lead() -> None:
    """Prepare the process that schedules a run."""
    os.environ[RUN] = str(os.getpid())
    for number in ENDS:
        signal.signal(number, _stop_all)


def follow() -> None:
    """Prepare the process of one task."""
    for number in ENDS:
        signal.signal(number, _interrupt)
    end_with_parent(int(os.environ[RUN]) if RUN in os.environ else None)


def _stop_all(number: int, frame: FrameType | None) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in children.read_text().split() if children.exists() else ():
        os.kill(int(pid), signal.SIGTERM)
    _interrupt(number, frame)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt
