"""Python that a model wrote, run in a process of its own: no network, an empty directory, limits of time, memory and files.

The one idea: the code passes only if it gets to its end, where it says a word that it was not told; an early exit is no pass. It keeps mistakes in, not
malice: files that this user may read or write outside of the directory it still may.
"""

import contextlib
import ctypes
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ptf.compute.launch import end_with_parent

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # clone(2)
FILES_MIB = 16


def run_python(source: str, *, seconds: float, memory_mib: int) -> bool:
    """Whether it ends without an error in that time of the processor's, and in twice that of the clock's. Raises OSError where the kernel gives it no network
    namespace of its own."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "said"

        def confine() -> None:
            if ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NETWORK):
                raise OSError(ctypes.get_errno())
            end_with_parent()
            limits = {
                resource.RLIMIT_CPU: math.ceil(seconds),
                resource.RLIMIT_AS: memory_mib << 20,
                resource.RLIMIT_FSIZE: FILES_MIB << 20,
                resource.RLIMIT_CORE: 0,
            }
            for limit, value in limits.items():
                resource.setrlimit(limit, (value, value))

        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=place,
                env={"PATH": os.defpath, "HOME": place}, start_new_session=True, preexec_fn=confine,
            )  # fmt: skip
        except subprocess.SubprocessError:
            raise OSError("code cannot be run apart from the network: this kernel lets no user make a network namespace (or set limits)") from None
        try:
            process.communicate(f"{source}\nopen({str(said)!r}, 'w').write({word!r})\n".encode(), timeout=2 * seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started dies with it
            process.wait(10)
        return process.returncode == 0 and said.exists() and said.read_text() == word
