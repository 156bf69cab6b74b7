"""Ends what a run's own Ray left behind. Also a process of its own, beside the run, for when the run is killed: `-m ptf.compute.reaper PID HOME`.

The one idea: all of Ray is known by the run's directory, which is in its command lines or among its open files. When a run is killed, Ray's
servers and workers end by themselves within seconds, but two helpers were still there after a minute, and the directory stays.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def family(home: Path) -> list[psutil.Process]:
    """Every process of the Ray that lives in `home`, and what they started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _belongs(process, str(home)):
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def _belongs(process: psutil.Process, home: str) -> bool:
    command = process.cmdline()
    if "ptf.compute.reaper" in command or not command:
        return False
    renamed = command[0].startswith("ray::")  # helpers and workers hide their command line, but log into the directory
    return any(home in part for part in command) or (renamed and any(home in file.path for file in process.open_files()))


def end(processes: Sequence[psutil.Process], home: Path, grace_s: float) -> None:
    """Wait for them to end by themselves, kill those that do not, remove the directory."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    shutil.rmtree(home, ignore_errors=True)


def main(driver: int, home: Path) -> None:
    while os.getppid() == driver:
        time.sleep(0.2)
    end(family(home), home, grace_s=3.0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
