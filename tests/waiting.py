"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable


def until(there: Callable[[], object], seconds: float = 120, every: float = 0.02) -> None:
    """Return as soon as it is there; it must be, in time."""
    ends = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < ends, f"not there after {seconds:g} s"
        time.sleep(every)
