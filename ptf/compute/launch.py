"""Running one function on every worker: in this process, under torchrun, or as a gang on Ray.

The one idea: the function is `module:name` with plain arguments and finds its rank in the environment, so it does not know who started it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ptf.compute.world import pick_device
from ptf.errors import UserError


def default_threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def torchrun(arguments: Sequence[str], workers: int, threads: int) -> None:
    """`torchrun … -m ptf.run ARGUMENTS` on this machine. Raises UserError with its exit status if it fails (its output says why)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "-m", "ptf.run", *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=False)
    if done.returncode:
        raise UserError(f"torchrun ended with status {done.returncode}; its lines above say why")


def on_ray(
    function: Callable[..., object], arguments: Sequence[object], *, workers: int, device: str, threads: int | None, address: str | None,
    workdir: Path, timeout_s: float,
) -> None:  # fmt: skip
    """A verl worker group runs the function on every rank."""
    from ptf.compute.gang import run_gang
    from ptf.compute.ray_session import ray_session

    gpu = pick_device(device).type == "cuda"
    with ray_session(address=address, workdir=workdir, cpus=workers, timeout_s=timeout_s):
        run_gang(function, arguments, workers=workers, use_gpu=gpu, threads=threads or default_threads(workers), timeout_s=timeout_s, label="train")
