"""The suite leaves nothing behind: a session in which a process, a listening port, a file in shared memory or a
temporary file outlives the tests fails.

Only what descends from this session counts, for others work on the same machine. A process is known by a variable in
its environment or by having been seen as a descendant; a file in shared memory by the process that had it mapped, or
whose number it bears; temporary files by TMPDIR, which is the session's own. Also a plugin of pytest: `-p
tests.leftovers`.
"""

import multiprocessing.util
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

MARK = "SUITE_MARK"  # in the environment of all that descends from a session
SHARED = Path("/dev/shm")
EVERY_S = 2.0
GRACE_S = float(os.environ.get("SUITE_GRACE_S", "20"))  # for what was told to end
# which libraries keep for later processes of this user
CACHES = ("torchinductor_", "pytest-of-", "hsperfdata_", "matplotlib-", "fontconfig")
# files that vLLM's engines and Metaflow's cards leave, whoever uses them
LIBRARIES = re.compile(r"vllm_dist_\w+|tmp\w{8}\.json")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # of this process, with which they end


AFTER_ITS_DIRECTORY = -200  # multiprocessing removes its own directory at -100


class Session:
    """Watches from its start; `found` says what is left at its end."""

    def __init__(self) -> None:
        self.mark, self.seen, self.files = uuid.uuid4().hex, dict[int, float](), set[str]()
        self.before = self._shared()
        self.kept = {name: os.environ.get(name) for name in (MARK, "TMPDIR", "PYTEST_DEBUG_TEMPROOT")}
        # where tmp_path stays
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
        self.place = Path(tempfile.mkdtemp(prefix="suite-", dir="/tmp"))  # short, for Ray's sockets
        os.environ |= {MARK: self.mark, "TMPDIR": str(self.place)}
        tempfile.tempdir = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        """Note the descendants there are now, and the files in shared memory that are theirs."""
        ours = {process.pid: process for process in self._ours()}
        self.seen |= {pid: process.create_time() for pid, process in ours.items() if process.is_running()}
        for name in self._shared() - self.before - self.files:
            numbered = {int(number) for number in re.findall(r"\d+", name)} & (self.seen.keys() | {os.getpid()})
            if numbered or any(str(SHARED / name) in _maps(process) for process in [*ours.values(), psutil.Process()]):
                self.files.add(name)

    def _ours(self) -> Iterator[psutil.Process]:
        """Living processes that descend from this one, but for this one."""
        mine = os.getpid()
        for process in psutil.process_iter():
            try:
                if process.ppid() == mine and any(helper in " ".join(process.cmdline()) for helper in HELPERS):
                    continue
                known = self.seen.get(process.pid) == process.create_time()
                if (
                    process.pid != mine
                    and process.status() != psutil.STATUS_ZOMBIE
                    and (known or process.environ().get(MARK) == self.mark)
                ):
                    yield process
            except (psutil.Error, OSError):
                continue
        for child in psutil.Process().children(recursive=True):  # those whose environment is another, too
            try:
                if child.status() != psutil.STATUS_ZOMBIE and not any(
                    helper in " ".join(child.cmdline()) for helper in HELPERS
                ):
                    yield child
            except psutil.Error:
                continue

    def _shared(self) -> set[str]:
        return set(os.listdir(SHARED)) if SHARED.is_dir() else set()

    def found(self) -> list[str]:
        """A line for each thing that is left, which is then ended or removed."""
        ends = time.monotonic() + GRACE_S
        while (left := {process.pid: process for process in self._ours()}) and time.monotonic() < ends:
            time.sleep(0.2)
        self.ended.set()
        self.thread.join()
        self.look()
        lines = []
        for process in left.values():
            try:
                lines.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}; {_ports(process)}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        lines += [f"port of this process: {port}" for port in _ports(psutil.Process())]
        psutil.wait_procs(list(left.values()), timeout=GRACE_S)
        for name in sorted(self.files & self._shared()):
            if not any(str(SHARED / name) in _maps(process) for process in [psutil.Process()]):
                lines.append(f"shared memory: {SHARED / name}")
                (SHARED / name).unlink(missing_ok=True)
        helpers = multiprocessing.current_process()._config.get("tempdir")  # removed as this process ends
        lines += [
            f"temporary: {path}"
            for path in sorted(self.place.iterdir())
            if not (path.name.startswith(CACHES) or LIBRARIES.fullmatch(path.name) or str(path) == helpers)
        ]
        if helpers and self.place in Path(helpers).parents:
            multiprocessing.util.Finalize(
                None, shutil.rmtree, [self.place], {"ignore_errors": True}, exitpriority=AFTER_ITS_DIRECTORY
            )
        else:
            shutil.rmtree(self.place, ignore_errors=True)
        for name, value in self.kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        return lines


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def _ports(process: psutil.Process) -> list[str]:
    try:
        return [f"{at.laddr.ip}:{at.laddr.port}" for at in process.net_connections() if at.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of one of xdist's processes, whose session this is not
        config.stash[SESSION] = Session()


SESSION = pytest.StashKey[Session]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield  # fixtures, and xdist's processes, have ended
    watched = session.config.stash.get(SESSION, None)
    if watched is not None and (lines := watched.found()):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line("The tests have left behind:", red=True)
            for line in lines:
                reporter.write_line(f"  {line}", red=True)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
