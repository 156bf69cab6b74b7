"""Starting processes of ptf on this machine, alone or as ranks under torchrun; ptf.compute.gang starts them on Ray."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.compute.heartbeat import ADDRESS, Monitor
from ptf.config.sections.compute import ComputeConfig
from ptf.errors import Retryable
from ptf.workspace import scratch
from ptf.workspace.entry import PARENT, PATH, end_with_parent  # noqa: F401  the latter is imported from here

ENTRY = "ptf.workspace.entry"
LAUNCHED = "PTF_LAUNCHED"  # set for a run that another process of ptf began and submitted as a job of a Ray cluster


# the number of ranks on this machine, by who started them: verl's worker groups, torchrun; of all, where neither did
LOCAL_SIZE = ("RAY_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")


def default_threads(workers: int | None = None) -> int:
    """Return this machine's cores divided by the number of workers on it, by default of the ranks that were started
    with this one; at least 1."""
    if workers is None:
        workers = next((int(os.environ[name]) for name in LOCAL_SIZE if name in os.environ), 1)
    return max(1, (os.cpu_count() or 1) // workers)


def torchrun(arguments: Sequence[str], compute: ComputeConfig, workdir: Path) -> None:
    """Run `torchrun … -m ptf.run ARGUMENTS` on this machine.

    Raises Retryable with its exit status if it fails (its output gives the reason), or if a rank sends no heartbeat for
    `compute.timeout_s`. The agent's temporary files lie below `workdir`.
    """
    workers, timeout_s = compute.workers, compute.timeout_s
    with contextlib.closing(Monitor("train")) as monitor, scratch.directory(workdir / "torchrun") as logs:
        options = ["--log-dir", str(logs), "--standalone", f"--nproc-per-node={workers}", "-m", ENTRY, "ptf.run"]
        # without OMP_NUM_THREADS, torchrun sets it to 1
        environment = {"OMP_NUM_THREADS": str(compute.threads or default_threads(workers)), ADDRESS: monitor.address}
        agent = start("torch.distributed.run", [*options, *arguments], environment)
        try:
            while agent.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(1.0)
                for message in monitor.poll(range(workers)):
                    print(message, flush=True)
                if silent := [rank for rank in range(workers) if monitor.silent_seconds(rank) > timeout_s]:
                    raise Retryable(
                        f"no heartbeat for {timeout_s:g} s: "
                        + ", ".join(f"rank {rank}{monitor.describe(rank)}" for rank in silent)
                    )
        except BaseException:
            agent.terminate()  # it passes the signal on to its ranks
            try:
                agent.wait(60)  # it gives them 30 s
            except subprocess.TimeoutExpired:
                agent.kill()  # its ranks die with it
                agent.wait()
            raise
    if agent.returncode:
        raise Retryable(f"torchrun ended with status {agent.returncode}; its lines above give the reason")


def start(module: str, arguments: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Start a process that runs a Python module and ends with the thread that called this, even while it still imports
    (ptf.workspace.entry).

    No code of ptf runs between fork and exec, where other threads' locks are held.
    """
    return subprocess.Popen(
        [sys.executable, "-m", ENTRY, module, *arguments], env={**os.environ, **environment, **as_child()}, **options
    )


def as_child() -> dict[str, str]:
    """Return the variables with which a process of `ptf.workspace.entry` is bound to this one, and finds modules as it
    does."""
    return {PARENT: str(os.getpid()), PATH: os.pathsep.join(map(os.path.abspath, sys.path))}


def needs_ray(compute: ComputeConfig) -> bool:
    """Return whether the workers of an offline recipe are a gang on Ray. One worker on this machine is this process."""
    return compute.launcher == "ray" and (compute.workers > 1 or compute.address is not None)
