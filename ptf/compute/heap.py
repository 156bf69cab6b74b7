"""The memory of a process that computes on a CPU.

glibc maps every large tensor anew and gives it back to the kernel when it is freed, so each step touches all of its
memory for the first time. A process that keeps what it has freed takes less CPU time for a step
(benchmarks/train_step.py runs the peers both ways); with an empty GLIBC_TUNABLES it leaves the heap as glibc has it.
"""

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's parameters, malloc.h
OWN = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep() -> bool:
    """Let glibc keep freed memory for the next tensors of this process, and return whether it does.

    It is left as it is where one of the variables of `OWN` sets it, and with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in OWN):
        return False
    return mallopt(MMAP_MAX, 0) == 1 and mallopt(TRIM_THRESHOLD, -1) == 1  # no mapping of its own, no trimming
