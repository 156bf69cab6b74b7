"""A Ray cluster of one node, as an operator starts one: `ray start --head`, on loopback, in a directory of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ptf.compute.launch import ENTRY, as_child
from ptf.compute.reaper import end, family
from tests.server_process import free_port

START_S, GRACE_S = 180.0, 20.0


@dataclass(frozen=True)
class Head:
    """`address` is joined, `jobs` takes them; `env` is that of whoever comes to it without any variable of Ray's,
    and with a HOME without a token."""

    address: str
    jobs: str
    env: dict[str, str]


@contextlib.contextmanager
def running(variables: Mapping[str, str] = {}, places: int = 3) -> Iterator[Head]:
    """Started with these variables of Ray's alone; all of it has ended after the block."""
    home = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short, for Ray's sockets
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(home),
        "TMPDIR": str(home),
    }
    gcs, jobs = outside_workers(), free_port()
    # jobs go through the agent: those of two clusters on one machine would meet
    ports = f"--port={gcs} --dashboard-port={jobs} --dashboard-agent-listen-port={free_port()}"
    places_of = f"--num-cpus={places} --temp-dir={home / 'r'} --node-ip-address=127.0.0.1 --dashboard-host=127.0.0.1"
    words = f"ray.scripts.scripts start --head --block --disable-usage-stats {places_of} {ports}"
    line = [sys.executable, "-m", ENTRY, *words.split()]
    with (home / "log").open("w") as log:
        started = subprocess.Popen(
            line, env=env | dict(variables) | as_child(), stdout=log, stderr=log, start_new_session=True
        )
    head = Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{jobs}", env)
    try:
        ends = time.monotonic() + START_S
        while not answers(head.jobs):
            assert started.poll() is None, (home / "log").read_text()[-3000:]
            assert time.monotonic() < ends, (home / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield head
    finally:
        started.send_signal(signal.SIGTERM)  # it ends the servers that it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(GRACE_S)
        started.kill()
        started.wait()
        end(home, GRACE_S, family(home))
        shutil.rmtree(home, ignore_errors=True)


def answers(jobs: str) -> bool:
    try:
        return urllib.request.urlopen(f"{jobs}/api/authentication_mode", timeout=5).status == 200
    except OSError:
        return False


def outside_workers() -> int:
    """A free port that is not among those of Ray's workers, 10002 to 19999, which it refuses."""
    while 10_000 <= (port := free_port()) < 20_000:
        pass
    return port
