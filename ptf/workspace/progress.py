"""Lines of progress: what a stage does, how far it is and how long it will take, where it would be silent otherwise.

A stage (training, an evaluation) opens `stage`; what it calls opens a `phase`, and counts. A thread prints the open
phases, the outermost first, as often as needed for no gap between two lines to be longer than `EVERY_S`. Without a
stage around them, phases print nothing.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 25.0  # so that, with what a busy machine adds, 30 s do not pass


@dataclass(eq=False)
class Phase:
    """What is done, of which `done` of `total` units are; without a total, its seconds say how far it is."""

    name: str
    total: float = 0.0
    unit: str = ""
    first: float = 0.0  # units that were done before
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def advance(self, units: float = 1.0) -> None:
        """Count further units."""
        self.done += units

    def __str__(self) -> str:
        spent, done = time.monotonic() - self.began, self.done - self.first
        if not self.total:
            return f"{self.name}, {spent:.0f} s"
        left = f", about {spent * (self.total - self.done) / done:,.0f} s left" if done else ""
        return f"{self.name}, {self.done:,.0f} of {self.total:,.0f} {self.unit}, {spent:.0f} s{left}"


class Reporter:
    """The open phases of a process, and the thread that prints them."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.is_reporting = False
        self.last = 0.0  # when a line was printed

    @contextlib.contextmanager
    def phase(self, name: str, total: float = 0.0, unit: str = "", first: float = 0.0) -> Iterator[Phase]:
        """Name what the block does. `first`: units that were done before it."""
        phase = Phase(name, total, unit, first, done=first)
        self.phases.append(phase)
        try:
            yield phase
        finally:
            self.phases.remove(phase)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print lines while the block runs; inside another stage it is a phase of that one."""
        with self.phase(name), contextlib.ExitStack() as stack:
            if not self.is_reporting:
                self.is_reporting, ended = True, threading.Event()
                self.said()
                thread = threading.Thread(target=self._report, args=(ended,), name="ptf-progress", daemon=True)
                thread.start()
                stack.callback(setattr, self, "is_reporting", False)
                stack.callback(thread.join)
                stack.callback(ended.set)
            yield

    def said(self) -> None:
        """Note that a line was printed, so that the next one is not due for `EVERY_S`."""
        self.last = time.monotonic()

    def counted(self, items: Sequence[T], name: str, unit: str) -> Iterator[T]:
        """Yield the items, in a phase that counts them."""
        with self.phase(name, len(items), unit) as phase:
            for item in items:
                yield item
                phase.done += 1

    def _report(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_S / 25):
            if time.monotonic() - self.last >= EVERY_S:
                self.said()
                print("progress: " + " › ".join(map(str, list(self.phases))), flush=True)


REPORTER = Reporter()  # a process has one standard output
phase, stage, said, counted = REPORTER.phase, REPORTER.stage, REPORTER.said, REPORTER.counted
