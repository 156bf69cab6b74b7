"""A server under test, as a process of its own that listens on loopback."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

STARTS_WITHIN_S = 120.0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def listening(command: Callable[[int], Sequence[str]]) -> Iterator[int]:
    """Start `command(port)`; yield the port once the process listens. It must, before it ends and in time."""
    port = free_port()
    with subprocess.Popen(command(port), stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + STARTS_WITHIN_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server does not listen"
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
