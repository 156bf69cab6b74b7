"""One judgement: a process that starts two cells, one for the tests and one for the response, waits for the verdict,
and ends all processes that either has started.

It runs as long as its standard input is open, so when the process that started it ends, for whatever reason, it and its
cells end too. It is run as `python -c 'from ptf.rl.rewards.sandbox.judgement import main; main()' JSON`, reads a line
of JSON and writes another.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any

from . import answer, row_tests
from .cells import Cell, read, spare_uid, start
from .syscalls import LIBC

ENDS_WITHIN_S = 20.0
PREFIX = "ptf-code-"  # of directories; the id of the process that made them follows


class Gone(Exception):
    """The process that waited for the verdict has ended."""


def main() -> None:
    """Judge one response, which is read from standard input, and write the verdict to standard output."""
    given = json.loads(sys.argv[1])
    place, wall_s = given.pop("place"), given.pop("wall_s")
    cell = Cell(**given)
    sys.executable = os.path.realpath(sys.executable)  # where cells see it
    LIBC.prctl(36, 1)  # orphans of either cell become this process's children
    cells, made = [cell, cell], list[str]()
    try:
        if cell.mode.startswith("uid"):
            cells = [cell._replace(uid=spare_uid(i)) for i in (0, 1)]
        if not cell.mounts:
            remove_stale(place)
            for i, one in enumerate(cells):
                made.append(f"{place}/{PREFIX}{namespace()}-{os.getpid()}-{started(os.getpid())}-{i}")
                os.mkdir(made[-1], 0o700)
                if one.uid >= 0:
                    os.chown(made[-1], one.uid, one.uid)
            cells = [one._replace(directory=d) for one, d in zip(cells, made, strict=True)]
        verdict = judged(cells, wall_s)
    except Gone:
        verdict = None
    except OSError as error:
        verdict = {"error": f"{type(error).__name__}: {error}"}
    finally:
        for directory in made:
            remove(directory)
    if verdict is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(verdict).encode() + b"\n")


def judged(cells: list[Cell], wall_s: float) -> dict[str, Any]:
    """Judge one response in two new cells."""
    link, theirs = socket.socketpair()
    control, tests_end = socket.socketpair()
    troubled, trouble = os.pipe()
    pids: dict[int, Cell] = {}
    try:
        answering = start(cells[1], answer.serve, [theirs], trouble)
        pids[answering] = cells[1]
        pids[start(cells[0], row_tests.serve, [tests_end, link], trouble)] = cells[0]
        LIBC.prctl(4, 0)  # not to be traced
        for end in (link, theirs, tests_end):
            end.close()
        os.close(trouble)
        job = sys.stdin.buffer.readline()
        if not job.endswith(b"\n"):
            raise Gone
        try:
            control.sendall(job)
            verdict = awaited(control, answering, pids, wall_s)
        except ConnectionError as error:  # a cell that could not be made
            verdict = {"error": f"the tests' cell ended: {error}"}
    finally:
        control.close()
        if left := sweep(pids):
            raise OSError(f"{len(left)} processes did not end in {ENDS_WITHIN_S:g} s")
    if wrong := os.read(troubled, 1000):
        return {"error": wrong.decode(errors="replace")}
    return verdict


def awaited(control: socket.socket, answering: int, pids: dict[int, Cell], wall_s: float) -> dict[str, Any]:
    """Return the verdict of the tests' side; if there is none in time, one that names the side at fault."""
    until, data, turn = time.monotonic() + wall_s, b"", "tests"
    ended = os.pidfd_open(answering)
    try:
        watched = [0, control, ended]
        while (left := until - time.monotonic()) > 0:
            ready = select.select(watched, [], [], left)[0]
            if 0 in ready:
                raise Gone  # nothing more is written to it
            if ended in ready:  # what it has started may hold its end of the link
                watched.remove(ended)
                sweep({answering: pids[answering]}, others=pids.keys() - {answering})
            if control in ready:
                part = control.recv(1 << 16)
                if not part:
                    break
                data += part
                *lines, data = data.split(b"\n")
                for message in map(json.loads, lines):
                    if isinstance(message, dict):
                        return message
                    turn = message
        why = f"the response, or what it returned, took longer than its limits (at most {wall_s:g} s by the clock)"
        return (
            {"value": 0.0, "why": why}
            if turn == "answer"
            else {"none": "the tests did not end before they asked the response for anything"}
        )
    finally:
        os.close(ended)


def sweep(cells: dict[int, Cell], others: Collection[int] = ()) -> set[int]:
    """End the cells and all that they have started; return the processes that have not ended after `ENDS_WITHIN_S`.

    With `others`, the cells that continue, it does not wait.
    """
    until, left = time.monotonic() + ENDS_WITHIN_S, set(cells)
    while True:
        for cell in cells.values():
            if cell.mode == "uid":
                kill_all_of(cell.uid)
        found = descendants(others) if any(not cell.mounts for cell in cells.values()) else left
        for pid in {*found, *left}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if others:
            return set()
        try:
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                left.discard(pid)
        except ChildProcessError:
            return set()
        if time.monotonic() > until:
            return left or {-1}
        time.sleep(0.002)


def kill_all_of(uid: int) -> None:
    """Send SIGKILL to every process of a user at once."""
    if not (pid := os.fork()):
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def descendants(others: Collection[int]) -> set[int]:
    """Return all descendants of this process except `others` and theirs."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parent = int(read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, new = set[int](), {os.getpid()}
    while new:
        new = {child for pid in new for child in children.get(pid, []) if child not in others}
        found |= new
    return found


def started(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if there is no such process."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    except OSError:
        return None


def remove_stale(place: str) -> None:
    """Remove the directories of processes that were killed."""
    ours = f"{PREFIX}{namespace()}-"
    for name in os.listdir(place):
        pid, _, since = name.removeprefix(ours).rpartition("-")[0].partition("-")
        if name.startswith(ours) and pid.isdigit() and started(int(pid)) != since:
            remove(f"{place}/{name}")


def namespace() -> int:
    """Return the PID namespace of this process; other containers may share the directory, but not the ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def remove(directory: str) -> None:
    """Remove a directory, as far as this process may."""
    import shutil  # which takes as long to load as the rest, and is not needed where cells have files of their own

    shutil.rmtree(directory, ignore_errors=True)
