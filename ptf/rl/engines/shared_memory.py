"""Removes the names of the shared memory and the sockets of a multi-process vLLM engine once it has started, so that an
engine that is killed leaves no files behind.

All its processes are connected by then, and nothing needs these names any more.
"""

import contextlib
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

MAPPED = re.compile(r"/dev/shm/((?:psm_|vllm_dist_)\S+)$", re.MULTILINE)  # Python's, and vLLM's collectives on a CPU


@contextlib.contextmanager
def nothing_outlives_it() -> Iterator[None]:
    """Run a block that starts an engine, whose processes are children of this one; remove the names afterwards."""
    with tempfile.TemporaryDirectory() as sockets:
        os.environ["VLLM_RPC_BASE_PATH"] = sockets
        try:
            yield
        finally:
            del os.environ["VLLM_RPC_BASE_PATH"]
    unlink_shared_memory([os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())])


def unlink_shared_memory(pids: Iterable[int]) -> list[str]:
    """Remove the names of the shared memory that these processes have mapped, and go on using; return them."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # a process that has ended
            names |= set(MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")
        if name.startswith("psm_"):
            resource_tracker.unregister(f"/{name}", "shared_memory")
    return sorted(names)
