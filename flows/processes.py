"""The processes of a flow's run: none of them outlives the run, also if one is killed.

On SIGTERM or Ctrl-C the run passes the signal on; its tasks unwind (`finally`, Ray's shutdown, child processes) for the
5 s that Metaflow grants, then it kills the rest. If the run itself is killed outright, the kernel kills its tasks.
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
        sys.exit("the run that started this task is gone")  # it was killed before the line above


def _stop_all(number: int, frame: FrameType | None) -> None:
    for pid in _children():
        os.kill(pid, signal.SIGTERM)
    _interrupt(number, frame)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # a second one must not cut the unwinding short
    raise KeyboardInterrupt


def _children() -> list[int]:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # 0, where no run is named, is our own process group
    except ProcessLookupError:
        return False
    return True
