"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any


def until(there: Callable[[], Any], seconds: float = 120, every: float = 0.02) -> Any:
    """Return what is there as soon as something is; it must be, in time."""
    ends = time.monotonic() + seconds
    while True:
        found = there()
        if found:
            return found
        assert time.monotonic() < ends, f"not there after {seconds:g} s"
        time.sleep(every)
