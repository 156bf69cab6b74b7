"""The processes of a flow's run: none of them outlives the run, even if a process is killed.

On SIGTERM or Ctrl-C the run sends SIGTERM to its tasks, which clean up (`finally`, Ray's shutdown, child processes)
within the 5 s that Metaflow allows; then Metaflow kills the remaining ones. If the run itself is killed with SIGKILL,
the kernel kills its tasks.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

RUN = "PTF_RUN_PID"
ENDS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def lead() -> None:
    """Prepare the process that schedules a run."""
    os.environ[RUN] = str(os.getpid())
    for number in ENDS:
        signal.signal(number, _stop_all)


def follow() -> None:
    """Prepare the process of one task."""
    for number in ENDS:
        signal.signal(number, _interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _alive(int(os.environ.get(RUN, 0))):
        sys.exit("the run that started this task has ended")  # it was killed before the call of prctl


def _stop_all(number: int, frame: FrameType | None) -> None:
    for pid in _children():
        os.kill(pid, signal.SIGTERM)
    _interrupt(number, frame)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt


def _children() -> list[int]:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # pid 0, if the variable is not set, is this process group, which exists
    except ProcessLookupError:
        return False
    return True
