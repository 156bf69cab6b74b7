"""Ray for the length of a run: one of its own, or a running cluster joined by address.

The one idea: a run leaves nothing behind. Its own Ray lives in a temporary directory, token included (nothing goes under the home
directory), and on exit every process that it started is gone, after a grace period by force, also if the run itself is killed.
A Ray that this process is already connected to is used as it is and left running.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Ray reads these when it is imported: import this module before ray or verl. A mode that is set later reaches Ray's servers but not this
# process, which they then refuse.
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
# Niceness: with Ray's default of 15, training was 2-20 times slower beside any other work on the machine.
os.environ.update({"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **os.environ})

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]

from ptf import scratch
from ptf.compute.reaper import OWNER, PREFIX, end, end_abandoned, family

NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name for it: the systems where 0 is the default
GRACE_S = 10.0  # for Ray's processes to end by themselves; they take 1-2 s on an idle 2-core machine
DRAIN_S = 0.6  # the last lines that workers print take up to 0.5 s to reach the driver


@contextlib.contextmanager
def ray_session(
    *, address: str | None = None, workdir: Path | None = None, cpus: int | None = None, gpus: int | None = None, timeout_s: float = 120.0
) -> Iterator[None]:
    """Connect this process to Ray. `address` joins a running cluster (`auto`: the one in RAY_ADDRESS, as in a submitted job); None starts one here.

    `cpus` is how many slots for processes the run needs: a slot places a process and does not limit what it uses, so there may be more slots
    than cores. `gpus` None: those Ray finds. If the run fails, the logs of its own Ray are kept in `workdir`/ray-logs. `timeout_s` bounds the start.
    """
    if ray.is_initialized():
        yield
        return
    quiet = {"logging_level": "warning", "log_to_driver": True}
    if address is not None:
        _reachable(address, timeout_s)
        with _sigterm_kept():
            ray.init(address=address, **quiet)
        try:
            yield
        finally:
            time.sleep(DRAIN_S)
            ray.shutdown()
        return
    base = tempfile.gettempdir()  # Ray's socket paths, 62 characters longer than its directory, must fit in 107
    base = base if len(base) <= 26 else "/tmp"
    end_abandoned(Path(base))
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # which only this user may enter; Ray opens its own directory, below, to everybody
    (home / OWNER).touch()
    owner = scratch.hold(home / OWNER)
    watch = [sys.executable, "-m", "ptf.compute.reaper", str(os.getpid()), str(home)]
    reaper = subprocess.Popen(watch, start_new_session=True, stdin=subprocess.DEVNULL)  # no signal to our group reaches it
    try:
        _own_token(home / "auth_token")
        os.environ["RAY_gcs_server_port_wait_time_s"] = str(int(timeout_s))  # noqa: SIM112  Ray's spelling
        with _sigterm_kept(), _loopback():
            slots = max(os.cpu_count() or 1, cpus or 1)
            ray.init(address="local", _temp_dir=str(home / "r"), include_dashboard=False, num_cpus=slots, num_gpus=gpus, **quiet)
        yield
    except BaseException:
        logs = home / "r" / "session_latest" / "logs"
        if workdir is not None and logs.exists():
            shutil.copytree(logs, workdir / "ray-logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        raise
    finally:
        time.sleep(DRAIN_S)
        processes = family(home)
        ray.shutdown()
        end(home, GRACE_S, processes)
        reaper.kill()
        reaper.wait()
        if owner is not None:
            os.close(owner)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """All that is started meanwhile, and what that starts, listens on 127.0.0.1 alone. Ray replaces that address by the machine's own wherever it is given
    one, except where it believes that it cannot be a cluster; it reads the variable when it is imported, so this process is told otherwise."""
    before = os.environ.get(NO_CLUSTER), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[NO_CLUSTER], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[1]
        os.environ.pop(NO_CLUSTER)
        if before[0] is not None:
            os.environ[NO_CLUSTER] = before[0]


def _own_token(path: Path) -> None:
    """A fresh secret that only this user reads."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)  # a notice that the mode was unset


def _reachable(address: str, timeout_s: float) -> None:
    """Raise ConnectionError unless the address answers in time: `ray.init` itself was still trying after ten minutes."""
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if where == "auto":
        return  # Ray looks for a cluster on this machine, and says at once if there is none
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        raise ValueError(f"compute.address is {where!r}; write host:port, or auto for the cluster named by RAY_ADDRESS")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no Ray cluster answers at {where} after {timeout_s:.0f} s: {error}; check compute.address") from error
        time.sleep(1.0)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray replaces the SIGTERM handler: put back one that the program had set."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
