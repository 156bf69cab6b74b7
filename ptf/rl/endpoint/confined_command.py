"""The program that runs a command of the user's: `python confined_command.py PARENT PLACE COMMAND…`, with the parent's
process id and the command's own directory.

When the command or the parent ends, or on SIGTERM, it ends everything that the command has started, also what has left
its process group: such processes become children of this one. It removes the directory if the parent has ended, or on
SIGTERM. The command runs in a Landlock domain of its own, so it cannot read the environment or the memory of processes
outside, nor, from Linux 6.12, send them signals; its files and its network are those of its user. With an empty PLACE
there is no directory, and no such domain. It is run as a file and imports nothing of ptf: the command may need another
Python.
"""

import ctypes
import os
import signal
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38  # linux/prctl.h
CREATE_RULESET, RESTRICT_SELF = 444, 446  # system calls of Landlock
READERS = (19, 21, 38)  # linux/capability.h: SYS_PTRACE, SYS_ADMIN, PERFMON, with which root reads any environment
SCOPE_SIGNAL, MAKE_BLOCK_DEVICE = 2, 1 << 11  # linux/landlock.h


def children() -> list[int]:
    """Return the process ids of this process's children."""
    found = list[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def end_all() -> None:
    """Kill all descendants: those of a killed child become children of this process."""
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def stop(place: str) -> None:
    """End everything, remove the command's directory, and end this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import shutil  # it takes longer than all else here, and most commands end by themselves

    end_all()
    if place:
        shutil.rmtree(place, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def isolate() -> None:
    """Enter a Landlock domain that denies access to processes outside of it, where the kernel has Landlock.

    It restricts files in nothing but the creation of block devices, and not even in that where a domain for signals
    alone can be made.
    """
    for capability in READERS:
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for a user, who has none
    version = LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    attributes = struct.pack("=QQQ", 0, 0, SCOPE_SIGNAL) if version >= 6 else struct.pack("=Q", MAKE_BLOCK_DEVICE)
    rules = LIBC.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0 or LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(rules)


def main(parent: int, place: str, command: list[str]) -> None:
    """Run the command to its end; end with its status, 128 + the signal that ended it, or 127 if it cannot be run."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # `stop` kills its process group
    signal.signal(signal.SIGTERM, lambda *_: stop(place))
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        stop(place)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            if place:
                isolate()
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    os.close(0)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    if os.getppid() != parent:
        stop(place)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
