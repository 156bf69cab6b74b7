"""Running one function on every worker: in this process, under torchrun, or as a gang on Ray.

The one idea: the function is `module:name` with plain arguments and finds its rank in the environment, so it does not know who started it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ptf.compute.heartbeat import ADDRESS, Monitor
from ptf.errors import Retryable

LAUNCHED = "PTF_LAUNCHED"  # set for a process that trains for another of ptf's, which has the run in hand


def default_threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def torchrun(arguments: Sequence[str], workers: int, threads: int, timeout_s: float) -> None:
    """`torchrun … -m ptf.run ARGUMENTS` on this machine. Raises Retryable with its exit status if it fails (its output says why), or if a rank
    is not heard of for `timeout_s`."""
    monitor = Monitor("train")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "-m", "ptf.run", *arguments]
    agent = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads), LAUNCHED: "1", ADDRESS: monitor.address}, preexec_fn=end_with_parent)
    try:
        while (status := _ended(agent)) is None:
            for news in monitor.look(range(workers)):
                print(news, flush=True)
            if silent := [rank for rank in range(workers) if monitor.silence(rank) > timeout_s]:
                raise Retryable(f"not heard of for {timeout_s:g} s: " + ", ".join(f"rank {rank}{monitor.about(rank)}" for rank in silent))
    except BaseException:
        agent.terminate()  # it passes the signal on to its ranks
        agent.wait(60)  # it gives them 30 s
        raise
    if status:
        raise Retryable(f"torchrun ended with status {status}; its lines above say why")


def _ended(process: subprocess.Popen) -> int | None:
    """Its status; None if it is there a second later."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def end_with_parent() -> None:
    """In a child: SIGKILL when the process that started it dies (prctl PR_SET_PDEATHSIG); ranks end when it is gone (`leave_with_parent`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def leave_with_parent() -> None:
    """End this process within a second of its parent's death, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def on_ray(
    function: Callable[..., object], arguments: Sequence[object], *, workers: int, device: str, threads: int | None, address: str | None,
    workdir: Path, timeout_s: float, label: str = "train",
) -> None:  # fmt: skip
    """A verl worker group runs the function on every rank; `label` is what the console and errors call it."""
    from ptf.compute.gang import gpus, run_gang
    from ptf.compute.ray_session import ray_session

    with ray_session(address=address, workdir=workdir, cpus=workers, timeout_s=timeout_s):
        gpu = device == "cuda" or (device == "auto" and gpus() > 0)
        run_gang(function, arguments, workers=workers, use_gpu=gpu, threads=threads or default_threads(workers), timeout_s=timeout_s, label=label)
