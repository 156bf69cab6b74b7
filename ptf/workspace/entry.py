"""The first code of a process that ptf starts: `python -m ptf.workspace.entry MODULE ARGUMENTS…` runs a module as
`python -m` would, bound to its parent.

Nothing heavy is imported before the kernel was told to kill this process together with its parent, and before the
parent was seen to be still alive. A process that first imports torch for seconds would outlive a parent that is killed
meanwhile, and then wait for its peers for half an hour.
"""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator

PARENT = "PTF_PARENT"  # in the environment of a process that is started so: its parent's process id
ORPHANED = 75  # exit status of a process whose parent was gone before it began
PATH = "PTF_PYTHON_PATH"  # in the same environment: the parent's path of modules
STARTED_BY = os.getppid()  # as it was when this module was imported
PR_SET_PDEATHSIG, SIGKILL = 1, 9  # linux/prctl.h; the module signal is not needed for one number


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import large packages without the garbage collector, which searches the objects that they create again and again:
    a tenth of the CPU time of importing torch, ray and verl."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the *thread* that started it ends, so it must be started by one that lasts.

    If `parent`, a process id, is given and is no longer this process's parent, exit at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(ORPHANED)


if __name__ == "__main__":
    if not os.environ.get(PARENT, "").isdigit():
        sys.exit(f"ptf.workspace.entry is started by ptf, which sets {PARENT}; start the module itself instead")
    end_with_parent(int(os.environ[PARENT]))
    # `-m` puts the current directory first, where its files hide modules of Python
    sys.path[:] = os.environ[PATH].split(os.pathsep)
    os.environ[PARENT] = str(os.getpid())  # for what this process starts in the same way
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
