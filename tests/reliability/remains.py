"""What is left behind by runs that were killed and continued: processes, files in shared memory, temporary files.

The process that kills adopts orphans, so what is left is a child that it still has.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

from ptf.workspace.scratch import PREFIX
from tests.leftovers import CACHES, GRACE_S

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Whatever descends from this process and has lost its parent becomes this one's child: a process that is left
    behind is one that is still there."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def in_shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def used_by_others(name: str) -> bool:
    """Whether a living process has it mapped or open, or has named it by its number. A semaphore is mapped under the
    name that it had while it was made, so its inode is looked for."""
    path = f"/dev/shm/{name}"
    try:
        mapped = re.compile(rf" {os.stat(path).st_ino} +/dev/shm/")
    except FileNotFoundError:
        return True  # it has been removed since
    if any(Path(f"/proc/{number}").exists() for number in re.findall(r"(?<=-)\d+(?=-)", name)):
        return True
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mapped.search((process / "maps").read_text()) or any(
                os.path.realpath(number) == path for number in (process / "fd").iterdir()
            ):
                return True
    return False


def living() -> list[str]:
    """Processes that this one has started or adopted and that do not end within a grace period,
    which are then killed."""
    ends = time.monotonic() + GRACE_S
    while True:
        try:
            done, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if not done:
            if time.monotonic() > ends:
                break
            time.sleep(0.01)
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            found.append(
                f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:200]}"
            )
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def untidy(place: Path) -> list[str]:
    """What lies in a directory for temporary files, but for what libraries keep there."""
    return [str(path) for path in sorted(place.iterdir()) if not path.name.startswith(CACHES)]


def half_made(place: Path) -> list[str]:
    """Files below that have a name for what is not yet whole."""
    return [str(path) for path in sorted(place.rglob("*")) if path.name.startswith(PREFIX) or path.suffix == ".tmp"]
