"""Ending a run early on request: SIGTERM (preemption), or a file `stop` in the run's directory.

The one idea: a request is only noted when it comes, and seen between two steps, where a checkpoint can be written. A launcher that gets SIGTERM
leaves the file, so its ranks see it wherever they are; the next attempt begins by removing it.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

STOP = "stop"


@contextlib.contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """`act` instead of dying, while the block runs; where this thread cannot take signals, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class Requests:
    """Whether this process was asked to end."""

    def __init__(self, run: Path) -> None:
        self._file, self._noted = run / STOP, False

    def note(self) -> None:
        self._noted = True

    @property
    def made(self) -> bool:
        return self._noted or self._file.exists()


@contextlib.contextmanager
def passing_on(run: Path) -> Iterator[None]:
    """For a process that waits for others which train."""
    with on_sigterm((run / STOP).touch):
        yield


def forget(run: Path) -> None:
    """Before a run's next attempt."""
    (run / STOP).unlink(missing_ok=True)
