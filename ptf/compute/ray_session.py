"""Ray for the duration of a run: its own, or a running cluster joined by address.

A run leaves nothing behind. Its own Ray lives in a temporary directory, token included (nothing is written under the
home directory), and on exit every process that it started has ended, after a grace period by force, also if the run
itself is killed. A Ray that this process is already connected to is used and left running. A start that fails, or a
cluster that does not answer, is tried again until `compute.timeout_s` has passed.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Ray reads these when it is imported: import this module before ray or verl.
# Niceness: with Ray's default of 15, training was 2-20 times slower beside any other work on the machine.
os.environ.update(
    {
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        **os.environ,
    }
)

import ray
from ray._private import ray_constants, services

from ptf.compute import ray_authentication
from ptf.compute.ray_authentication import EVERY_S, one_line
from ptf.compute.reaper import OWNER, PREFIX, end, end_abandoned, family
from ptf.errors import Retryable, UserError
from ptf.workspace import scratch

NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0, its default on those systems, means no cluster
GRACE_S = 10.0  # for Ray's processes to end by themselves; they take 1-2 s on an idle 2-core machine
LOGS = "ray-logs"  # in the run's directory, of a Ray that failed
DRAIN_S = 0.6  # the last lines that workers print take up to 0.5 s to reach the driver
# for the first server of a Ray of one's own, before it is started again; it takes 2-5 s on an idle machine
START_S = 120
QUICK_FAILURES = 3  # after that many starts that failed within QUICK_S, trying again does not help
QUICK_S = 20.0


def ray_session(
    *,
    address: str | None = None,
    workdir: Path | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    timeout_s: float = 120.0,
) -> contextlib.AbstractContextManager[None]:
    """Connect this process to Ray: `address` joins a running cluster (`auto`: the one in RAY_ADDRESS, as in a submitted
    job); None starts one here.

    `cpus` is the number of slots for processes that the run needs: a slot places a process and does not limit what it
    uses, so there may be more slots than cores. `gpus` None: those that Ray finds. If the run fails, the logs of its
    own Ray are kept in `workdir`/ray-logs. `timeout_s` bounds the start, which is tried again until then. Raises
    Retryable if Ray did not start or answer, UserError if the cluster needs another token or has none.
    """
    if ray.is_initialized():
        return contextlib.nullcontext()
    return _joined(address, timeout_s) if address is not None else _own(workdir, cpus, gpus, timeout_s)


@contextlib.contextmanager
def _joined(address: str, timeout_s: float) -> Iterator[None]:
    resolved = _resolved(address)

    def connect() -> None:
        try:
            with _sigterm_kept():
                ray.init(address=resolved, logging_level=logging.WARNING, log_to_driver=True)
        except (ConnectionError, RuntimeError) as error:
            ray.shutdown()
            if "ersion mismatch" in str(error):
                raise UserError(
                    f"compute.address: the Ray cluster at {resolved} has another version: {one_line(error)}"
                ) from error
            raise

    with ray_authentication.connected(resolved, timeout_s, "answers", connect):
        try:
            yield
        finally:
            time.sleep(DRAIN_S)
            ray.shutdown()


def _resolved(address: str) -> str:
    """Return the address as host:port. Raises UserError if it is not an address."""
    if address == "auto":
        try:
            address = services.canonicalize_bootstrap_address_or_die("auto")
        except ConnectionError as error:
            raise UserError(f"compute.address is auto, but RAY_ADDRESS names no cluster: {one_line(error)}") from None
    if not address.rpartition(":")[2].isdigit():
        raise UserError(
            f"compute.address is {address!r}; write host:port, or auto for the cluster named by RAY_ADDRESS"
        )
    return address


@contextlib.contextmanager
def _own(workdir: Path | None, cpus: int | None, gpus: int | None, timeout_s: float) -> Iterator[None]:
    first, quick_failures = time.monotonic(), 0
    while True:
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_started(workdir, cpus, gpus, timeout_s))
            except (UserError, ValueError, TypeError):
                raise
            except Exception as error:  # Ray raises a bare Exception if a server does not start in time
                quick_failures += time.monotonic() - begun < QUICK_S
                if time.monotonic() > first + timeout_s or quick_failures == QUICK_FAILURES:
                    logs = f" (its logs are in {workdir / LOGS})" if workdir else ""
                    raise Retryable(
                        f"Ray did not start on this machine in {time.monotonic() - first:.0f} s: {one_line(error)}"
                        f"{logs}"
                    ) from error
                print(f"Ray did not start ({one_line(error)}); starting it again", flush=True)
                time.sleep(EVERY_S)
                continue
            yield
            return


@contextlib.contextmanager
def _started(workdir: Path | None, cpus: int | None, gpus: int | None, timeout_s: float) -> Iterator[None]:
    base = tempfile.gettempdir()  # Ray's socket paths, 62 characters longer than its directory, must fit in 107
    base = base if len(base) <= 26 else "/tmp"
    end_abandoned(Path(base))
    # only this user may enter it; Ray opens its own directory, below, to everybody
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    (home / OWNER).touch()
    owner = scratch.hold(home / OWNER)
    # in a session of its own, so that no signal to this process's group reaches it
    reaper = subprocess.Popen(
        [sys.executable, "-m", "ptf.compute.reaper", str(os.getpid()), str(home)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    own = contextlib.ExitStack()
    try:
        token = home / "auth_token"
        token.touch(mode=0o600)  # a new secret that only this user can read
        token.write_text(secrets.token_hex(32))
        # it warns that the mode was unset
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        own.enter_context(ray_authentication.own(token))
        # the variable is in lower case in Ray
        os.environ["RAY_gcs_server_port_wait_time_s"] = str(int(min(timeout_s, START_S)) or 1)  # noqa: SIM112
        with _sigterm_kept(), _loopback():
            ray.init(
                address="local",
                _temp_dir=str(home / "r"),
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, cpus or 1),
                num_gpus=gpus,
                logging_level=logging.WARNING,
                log_to_driver=True,
            )
        yield
    except BaseException:
        logs = home / "r" / "session_latest" / "logs"
        if workdir is not None and logs.exists():
            shutil.copytree(logs, workdir / LOGS, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        raise
    finally:
        time.sleep(DRAIN_S)
        processes = family(home)
        ray.shutdown()
        own.close()
        end(home, GRACE_S, processes)
        reaper.kill()
        reaper.wait()
        if owner is not None:
            os.close(owner)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only, for everything that is started in the block.

    Ray replaces that address by the machine's own unless it believes that the system cannot form a cluster; it reads
    the variable at import, so the constant in this process is changed too.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with ray_authentication.environment(**{NO_CLUSTER: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the program's SIGTERM handler, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
