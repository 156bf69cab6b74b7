"""Locks between processes of one machine (flock), which the kernel releases when their holder dies."""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.01


@contextlib.contextmanager
def locked(file: Path, wait_s: float = math.inf) -> Iterator[bool]:
    """Hold the lock of a file, which is made where it is missing, and yield whether it was free within `wait_s`.

    The block also runs without the lock. Raises OSError where the file cannot be opened.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's; to lock it, it need only be read
        handle = os.open(file, os.O_RDONLY)
    try:
        ends, is_held = time.monotonic() + wait_s, False
        while not is_held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                if time.monotonic() >= ends:
                    break
                time.sleep(POLL_S)
        yield is_held
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has the file open
        os.close(handle)
