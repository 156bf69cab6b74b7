"""Ending a run early on request: SIGTERM (preemption), or a file `stop` in the run's directory.

A request is recorded when it arrives and takes effect between two steps, where a checkpoint can be written. A launcher
that receives SIGTERM writes the file, so that its ranks see the request on any machine; the next attempt removes it
first.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

STOP = "stop"


@contextlib.contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGTERM instead of ending the process, while the block runs. Does nothing outside the main thread,
    since only that can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@dataclass
class StopSignal:
    """Whether the run in a directory was asked to stop: by SIGTERM, or by a file there."""

    run: Path
    _set: bool = False

    def set(self) -> None:
        """Record that the run was asked to stop."""
        self._set = True

    @property
    def is_set(self) -> bool:
        """Whether there was a request to stop."""
        return self._set or (self.run / STOP).exists()


def passing_on(run: Path) -> contextlib.AbstractContextManager[None]:
    """Write the stop file on SIGTERM while the block runs; for a process that waits for the processes that train."""
    return on_sigterm((run / STOP).touch)
