"""Ending a run early on request: SIGTERM (preemption), or a file `stop` in the run's directory.

A request takes effect between two steps, where a checkpoint can be written. A process that receives SIGTERM writes the
file, so that all ranks see the request on any machine; the next attempt removes it first.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

STOP = "stop"


def is_asked_to_stop(run: Path) -> bool:
    """Return whether the run in a directory was asked to stop."""
    return (run / STOP).exists()


@contextlib.contextmanager
def sigterm_stops(run: Path) -> Iterator[None]:
    """Write the stop file on SIGTERM instead of ending the process, while the block runs. Does nothing outside the main
    thread, since only that can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: (run / STOP).touch())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
