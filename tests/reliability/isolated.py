"""pytest on a copy of the checkout that can do no harm: a mutation may remove the wrong directory, or kill every
process.

Each run is a fork of this process, which has imported the large libraries once, in Linux namespaces of
its own: all file systems are read-only but for a fresh /tmp (with the copy) and /dev/shm, no process outside can be
seen or signalled, and whatever is left ends with the run. It needs root.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = ("pytest", "hypothesis", "hypothesis.strategies", "numpy", "pyarrow.parquet", "pydantic", "yaml", "fsspec")
LIBRARIES += ("rich.console", "jinja2", "torch", "torch.distributed.checkpoint", "safetensors.torch", "transformers")
NEW_MOUNTS, NEW_IPC, NEW_PIDS = 0x20000, 0x8000000, 0x20000000  # linux/sched.h
PR_SET_PDEATHSIG = 1
TREE = Path("/tmp/ptf")  # within a run
STARTS_WITHIN_S = 120.0  # until the first test, which imports the package


@dataclass(slots=True)
class Run:
    """What became of one run of pytest."""

    status: int | None = None  # pytest's exit status; None: it was ended
    failed: list[str] = field(default_factory=list)  # tests, in order
    hung: str | None = None  # the test
    late: bool = False  # the time was over
    began: list[str] = field(default_factory=list)  # tests, in order
    output: str = ""
    result: bytes = b""  # what the plugin wrote
    cpu_s: float = 0.0
    seconds: float = 0.0


class Progress:
    """Plugin of pytest: runs the wanted tests in their order, and tells the process that waits which one begins."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.order = {name: i for i, name in enumerate(wanted)}
        self.events = self.results = -1  # file descriptors, set by `run`

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self.events, f"began {json.dumps(nodeid)}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.events, f"failed {json.dumps(report.nodeid)}\n".encode())

    def pytest_sessionfinish(self) -> None:
        used = sys.modules.get("ptf")
        assert used is None or str(used.__file__).startswith(str(TREE)), f"the tests ran on {used.__file__}"


def prepare(root: Path, scratch: Path) -> None:
    """A copy of the last commit in `scratch`, compiled, and the libraries in this process. Bytecode is checked by the
    hash of its source: a mutated file may have the size and the second of the original. Raises SystemExit where the
    checkout lies under /tmp, which a run does not see."""
    if root.resolve().is_relative_to("/tmp"):
        raise SystemExit(f"{root} lies under /tmp, and each run has a /tmp of its own: use a checkout elsewhere")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x"], cwd=scratch, input=archive, check=True)
    (scratch / ".venv").symlink_to(root / ".venv")
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "ptf", "steps"]
    subprocess.run(compiled, cwd=scratch, check=True)
    for name in LIBRARIES:
        importlib.import_module(name)


def run(
    scratch: Path,
    files: Sequence[str],
    plugin: Progress,
    change: tuple[str, bytes] | None = None,
    limit_s: Callable[[str], float] = lambda test: 300.0,
    total_s: float = float("inf"),
    exit_first: bool = True,
) -> Run:
    """Run tests of these files with the changed file. It is ended when one test takes longer than `limit_s` of it, or
    `total_s` after the first began."""
    events, plugin.events = os.pipe()
    output, plugin.results = os.memfd_create("output"), os.memfd_create("results")
    begun, began = Run(), time.monotonic()
    outer = os.fork()
    if outer == 0:
        try:
            os._exit(_namespace(lambda: _pytest(scratch, files, plugin, change, output, exit_first), plugin.events))
        finally:
            os._exit(70)
    os.close(plugin.events)
    for line in _lines(events, begun, limit_s, total_s):
        kind, _, rest = line.partition(" ")
        name = json.loads(rest)
        if kind == "began":
            begun.began.append(name)
        elif kind == "failed":
            begun.failed.append(name)
    os.close(events)
    _, status, usage = os.wait4(outer, 0)
    code = os.waitstatus_to_exitcode(status)
    begun.status = None if begun.late or begun.hung else code
    begun.cpu_s, begun.seconds = usage.ru_utime + usage.ru_stime, time.monotonic() - began
    begun.output, begun.result = _whole(output).decode(errors="replace"), _whole(plugin.results)
    return begun


def _whole(descriptor: int) -> bytes:
    """What was written there, which is closed."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _lines(events: int, begun: Run, limit_s: Callable[[str], float], total_s: float) -> Iterator[str]:
    """Lines of the run until it ends or is ended. The first is the number of the process that ends all others."""
    started = since = time.monotonic()
    rest, inner = b"", 0
    while True:
        now, current = time.monotonic(), begun.began[-1] if begun.began else None
        if current is None:
            left = started + STARTS_WITHIN_S - now
        else:
            left = min(since + limit_s(current) - now, started + total_s - now)
        if left <= 0:
            is_hung = current is None or since + limit_s(current) <= now
            begun.hung, begun.late = (current or "import") if is_hung else None, not is_hung
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
            return
        if not select.select([events], [], [], left)[0]:
            continue
        part = os.read(events, 1 << 16)
        if not part:
            return
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if not inner:
                inner = int(line)
                continue
            if line.startswith(b"began"):
                since = time.monotonic()
                started = started if begun.began else since
            yield line.decode()


def _namespace(work: Callable[[], int], events: int) -> int:
    """The status of `work`, done below process 1 of new namespaces; all in them ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(NEW_MOUNTS | NEW_IPC | NEW_PIDS):
        raise OSError(ctypes.get_errno(), "no namespaces: this needs root on Linux")
    first = os.fork()
    if first:
        os.write(events, f"{first}\n".encode())
        os.close(events)  # its end is that of the tests
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    mounts = "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs -o size=8g tmpfs /dev/shm && "
    mounts += "mount -t tmpfs -o mode=1777,size=8g tmpfs /tmp && mount -o bind,remount,ro /"
    try:
        subprocess.run(mounts, shell=True, check=True)
        child = os.fork()
        if child == 0:
            os._exit(_or_traceback(work))
        os.close(events)
        while (found := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(found[1])
        os._exit(code if code >= 0 else 128 - code)
    finally:
        os._exit(71)


def _or_traceback(work: Callable[[], int]) -> int:
    """The status of `work`; 70 where it raises."""
    try:
        return work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        return 70


def _pytest(
    scratch: Path,
    files: Sequence[str],
    plugin: Progress,
    change: tuple[str, bytes] | None,
    output: int,
    exit_first: bool,
) -> int:
    """pytest's status, in the copy of `scratch` with the change."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    shutil.copytree(scratch, TREE, symlinks=True)
    if change:
        (TREE / change[0]).write_bytes(change[1])
    Path("/tmp/home").mkdir()
    os.environ |= {"HOME": "/tmp/home", "PYTHONPATH": str(TREE)}
    os.environ.pop("TMPDIR", None)
    os.chdir(TREE)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("ptf", "steps", "flows", "tests", "benchmarks"):
            del sys.modules[name]
    here = Path(__file__).resolve().parents[2]
    sys.path[:] = [str(TREE), *(path for path in sys.path if here not in (Path(path), *Path(path).parents[:1]))]
    import pytest

    words = ["-q", "-p", "no:cacheprovider", "-n0", "--durations=0", "--durations-min=1000", *(["-x"] * exit_first)]
    code = int(pytest.main([*words, *files], plugins=[plugin]))
    sys.stdout.flush()
    atexit._run_exitfuncs()
    return code
