"""A cell: one isolated process, with limits of time, memory, processes and files.

It is isolated by the strongest means that this user and this kernel allow (`MODES`, best first); the same code runs in
it in every mode.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from . import syscalls
from .syscalls import LIBC, checked

MODES = {  # name: what it is, as a run's first lines say it
    "uid+namespaces": "an unused user id for each, with mount, process and network namespaces",
    "uid": "an unused user id for each",
    "namespaces": "user, mount, process and network namespaces",
    "bubblewrap": "bubblewrap",
    "subreaper": "processes of this user, swept afterwards",
}
# mount, pid, net, ipc, uts; clone(2)
NEW_USER, NEW_REST = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
# statvfs flag: mount flag, which a bind mount of another's must keep
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
DEVICES = ("null", "zero", "urandom", "random")
FIRST_UID = 2_000_000_000  # beyond what systems hand out; the cell's number and a process's id are added


class Cell(NamedTuple):
    """The limits of one side of a judgement."""

    mode: str
    seconds: float  # of the processor's
    memory_mib: int  # of each process
    processes: int
    files_mib: int  # all together where there is a tmpfs of its own, else each
    readable: Sequence[str]  # directories
    path: Sequence[str]  # sys.path
    directory: str = "/tmp"  # in which it may write
    uid: int = -1
    bubblewrap: str = ""  # its program
    filtered: bool = True  # seccomp and Landlock where they are; tests turn them off

    @property
    def mounts(self) -> bool:
        """Whether it sees files of its own."""
        return self.mode in ("uid+namespaces", "namespaces", "bubblewrap")


def read(path: str) -> str:
    """Return the text of a file."""
    with open(path) as file:
        return file.read()


def spare_uid(number: int) -> int:
    """Return a user id that nobody has, of those that this user namespace maps.

    Raise OSError where it maps too few.
    """
    ranges = [tuple(map(int, line.split())) for line in read("/proc/self/uid_map").splitlines()]
    first, _, count = max(ranges, key=lambda r: r[2])
    if count < 1 << 15:
        raise OSError("this user namespace maps no unused user ids")
    wanted = 2 * os.getpid() + number
    return (
        FIRST_UID + wanted
        if first <= FIRST_UID and first + count > FIRST_UID + (1 << 24)
        else first + count - 2 - wanted % (count // 2)
    )


def start(cell: Cell, serve: Callable[..., None], sockets: Sequence[socket.socket], trouble: int) -> int:
    """Start a cell in which `serve` runs with the sockets, and return its process id.

    What goes wrong before `serve` runs is written to `trouble`.
    """
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        LIBC.prctl(1, signal.SIGKILL)  # ends with its parent
        if os.getppid() != parent:
            os._exit(1)
        kept = [s.fileno() for s in sockets]
        keep_only([*kept, trouble])  # a copy of another cell's socket would keep it open after that cell has ended
        if cell.mode == "bubblewrap":
            _bubblewrap(cell, [*kept, trouble], serve)
        if cell.mounts:
            _namespaces(cell)
            outside = os.pidfd_open(os.getpid())
            _fork_and_wait([*kept, trouble])
            LIBC.prctl(1, signal.SIGKILL)
            if select.select([outside], [], [], 0)[0]:  # it ended before; from here getppid() cannot tell
                os._exit(1)
            os.close(outside)
            LIBC.prctl(4, 0)  # not to be traced
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _fork_and_wait([*kept, trouble])  # the first process of the namespace: with it everything in it ends
        confine(cell, [*kept, trouble])
        os.close(trouble)
    except BaseException as error:
        os.write(trouble, f"{type(error).__name__}: {error}".encode())
        os._exit(70)
    try:
        serve(*sockets)
    finally:
        os._exit(0)


def _fork_and_wait(held: Sequence[int]) -> None:
    """Return in a child; the parent lets go of `held`, waits for the child and ends as it does."""
    pid = os.fork()
    if not pid:
        return
    try:
        for fd in held:
            os.close(fd)
        while os.wait()[0] != pid:
            pass
    finally:
        os._exit(0)


def _namespaces(cell: Cell) -> None:
    uid, gid = os.getuid(), os.getgid()
    ours = cell.mode == "namespaces"
    checked(LIBC.unshare(NEW_REST | (NEW_USER if ours else 0)), "unshare")
    if ours:
        for file, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
            with open(f"/proc/self/{file}", "w") as written:
                written.write(text)
    _root(cell)


def _root(cell: Cell) -> None:
    """Give this process a root of its own.

    It holds the interpreter's and the system's directories, read-only, and a /tmp in memory.
    """
    _mount(None, "/", None, RECURSIVE | PRIVATE)

    def inside(d):
        return any(f"{p}/".startswith(f"{d}/") for p in cell.readable)

    base = next(d for d in ("/mnt", "/srv", "/media", "/opt", "/tmp", "/run") if os.path.isdir(d) and not inside(d))
    _mount("tmpfs", base, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    os.mkdir(f"{base}/tmp")
    _mount("tmpfs", f"{base}/tmp", "tmpfs", NO_SUID | NO_DEV, f"size={cell.files_mib}m,nr_inodes=4096,mode=1777")
    for path in cell.readable:
        os.makedirs(base + path, exist_ok=True)
        _mount(path, base + path, None, BIND | RECURSIVE)
        found = os.statvfs(path).f_flag
        kept = sum(flag for bit, flag in KEPT.items() if found & bit)
        _mount(None, base + path, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV | kept)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{base}/{name}")
    os.mkdir(f"{base}/dev")
    for name in DEVICES:
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT))
        _mount(f"/dev/{name}", f"{base}/dev/{name}", None, BIND)
    os.symlink("/tmp", f"{base}/dev/shm")
    os.chdir(base)
    checked(LIBC.pivot_root(b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", 2), "umount")
    os.chdir("/")
    _mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    checked(LIBC.mount(*given, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


def keep_only(held: Sequence[int]) -> None:
    """Close every other file but 0, 1 and 2."""
    first = 3
    for fd in sorted(held):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(cell: Cell, held: Sequence[int]) -> None:
    """Confine this process from now on. Of its open files it keeps those in `held`."""
    parent = os.getppid()
    os.setsid()
    keep_only(held)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.chdir(cell.directory)
    os.environ.clear()
    os.environ |= {
        "PATH": os.defpath,
        "HOME": cell.directory,
        "TMPDIR": cell.directory,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    sys.path[:] = cell.path
    limits = {
        resource.RLIMIT_CPU: ceil(cell.seconds),
        resource.RLIMIT_AS: cell.memory_mib << 20,
        resource.RLIMIT_FSIZE: cell.files_mib << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: _process_limit(cell),
        resource.RLIMIT_CORE: 0,
    }
    if cell.uid >= 0:
        os.setgroups([])
        os.setresgid(cell.uid, cell.uid, cell.uid)
        os.setresuid(cell.uid, cell.uid, cell.uid)
    for limit, value in limits.items():
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    checked(LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()), "capset")
    checked(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    if not cell.mounts:
        LIBC.prctl(1, signal.SIGKILL)  # setuid forgot it
        if os.getppid() != parent:
            os._exit(1)
        if cell.filtered and (version := syscalls.landlock_version()):
            readable = [p for p in [*cell.readable, "/bin", "/lib", "/lib64"] if os.path.exists(p)]
            syscalls.restrict_files(readable, [cell.directory, *(f"/dev/{name}" for name in DEVICES)], version)
    if cell.filtered and syscalls.known():
        syscalls.forbid(alone=cell.mode == "subreaper")
    LIBC.prctl(4, 0)  # not to be traced


def _process_limit(cell: Cell) -> int:
    """RLIMIT_NPROC counts a user's threads: everywhere, or since Linux 5.14 in a user namespace of its own."""
    if cell.uid >= 0:
        return cell.processes
    release = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in os.uname().release.split(".")[:2])
    if cell.mounts and release >= (5, 14):
        return cell.processes + 3  # those that wait
    try:
        threads = int(read("/proc/loadavg").split()[3].partition("/")[2])
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return threads + cell.processes


def _bubblewrap(cell: Cell, held: Sequence[int], serve: Callable[..., None]) -> None:
    """Confine this process by bwrap, which may make namespaces where its callers may not. Python is started anew."""
    if not cell.bubblewrap:
        raise OSError("bubblewrap (bwrap) is not installed")
    command = [cell.bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--perms", "1777", "--size", str(cell.files_mib << 20), "--tmpfs", "/tmp"]
    for path in cell.readable:
        command += ["--ro-bind", path, path]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += [
        "--ro-bind",
        os.path.dirname(__file__),
        "/sandbox/ptf/rl/rewards/sandbox",
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
    ]
    started = (
        "import sys; sys.path.insert(0, '/sandbox'); "
        "from ptf.rl.rewards.sandbox.cells import in_bubblewrap; in_bubblewrap()"
    )
    for fd in held:
        os.set_inheritable(fd, True)
    os.execv(
        command[0],
        [
            *command,
            os.path.realpath(sys.executable),
            "-P",
            "-s",
            "-S",
            "-c",
            started,
            json.dumps([cell._asdict(), held, serve.__module__]),
        ],
    )


def in_bubblewrap() -> None:
    """Serve in the process that bwrap started."""
    given, held, module = json.loads(sys.argv[1])
    *kept, trouble = held
    try:
        from . import answer, row_tests

        serve = {answer.__name__: answer.serve, row_tests.__name__: row_tests.serve}[module]
        confine(Cell(**given), held)
        os.close(trouble)
    except BaseException as error:
        os.write(trouble, f"{type(error).__name__}: {error}".encode())
        os._exit(70)
    serve(*[socket.socket(fileno=fd) for fd in kept])
    os._exit(0)
