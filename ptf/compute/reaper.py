"""Ending of the processes that a run's own Ray left behind.

`python -m ptf.compute.reaper PID HOME` does it from a process beside the run, for the case that the run is killed. All
processes of Ray are recognised by the run's directory, which is in their command lines or among their open files. When
a run is killed, Ray's servers and workers end by themselves within seconds, but two helpers still ran after a minute,
and the directory stays.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ptf.workspace import scratch

PREFIX = "ptf-ray-"  # of the directories of runs' own Rays
OWNER = "owner"  # a file there, locked by the run as long as it lives
ROUNDS = 10
KILLED_S = 10.0  # within which a killed process has ended


def family(home: Path) -> list[psutil.Process]:
    """Return every process of the Ray that lives in `home`, and what they started."""
    by_pid: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if not command or "ptf.compute.reaper" in command:
                continue
            renamed = command[0].startswith("ray::")  # helpers and workers, which log into the directory
            if any(str(home) in part for part in command) or (
                renamed and any(str(home) in file.path for file in process.open_files())
            ):
                by_pid[process.pid] = process
                by_pid |= {child.pid: child for child in process.children(recursive=True)}
    return list(by_pid.values())


def end(home: Path, grace_s: float, processes: Sequence[psutil.Process] = ()) -> None:
    """Wait for the processes to end, kill those that do not and those that they started meanwhile, and remove the
    directory."""
    left = list(processes) or family(home)
    for _ in range(ROUNDS):
        _, alive = psutil.wait_procs(left, timeout=grace_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=KILLED_S)
        if not (left := family(home)):
            break
        grace_s = 0.0
    shutil.rmtree(home, ignore_errors=True)


def end_abandoned(base: Path) -> None:
    """Remove what is left of runs that were killed together with their reaper."""
    for home in base.glob(f"{PREFIX}*"):
        owner = home / OWNER
        if owner.is_file() and owner.stat().st_uid == os.getuid():
            with scratch.abandoned(owner) as is_abandoned:
                if is_abandoned:
                    print(f"ray: removing what a killed run left in {home}", flush=True)
                    end(home, 0.0)


def main(driver: int, home: Path) -> None:
    """Wait until the driver ends, then end its Ray."""
    while os.getppid() == driver:
        time.sleep(0.2)
    end(home, grace_s=3.0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
