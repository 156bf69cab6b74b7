"""One writer a lineage: a lease that whoever trains, evaluates or publishes a run holds, and that every commit checks.

The one idea: the lease is a small file beside what it protects, replaced only by compare-and-swap (a lock of the file system; a conditional PUT in an
object store). Each change of the holder raises its token; a process whose token is no longer in the file has lost the lease and writes nothing more.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ptf import storage
from ptf.config import Job
from ptf.errors import UserError

FILE = "lease.json"
BEAT_S = 5.0  # between heartbeats
SILENT_S = 30.0  # without a heartbeat, after which a holder is succeeded
POLL_S = 1.0  # between two looks at the lease of another machine


class Held(UserError):
    """Another process holds the lease; the text says which one, since when, and how to take over."""


class LeaseLost(UserError):
    """Another process has taken the lease over, or somebody has removed it; this one must not write any more."""


@dataclass(frozen=True)
class Process:
    """Who holds a lease. Two processes are on one machine where boot id and PID namespace are the same (containers share the former)."""

    id: str
    host: str
    pid: int
    started: int  # clock ticks after the boot: a pid alone may have been given to another process since
    boot: str
    namespace: str

    @staticmethod
    def this() -> "Process":
        pid = os.getpid()
        return Process(uuid.uuid4().hex, socket.gethostname(), pid, _started(pid) or 0, *_machine())

    @property
    def is_here(self) -> bool:
        return bool(self.boot) and (self.boot, self.namespace) == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended, which it can be on its own machine alone."""
        return self.is_here and _started(self.pid) != self.started


def _machine() -> tuple[str, str]:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: nothing is known of other processes, and only heartbeats count
        return "", ""


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks after the boot; None where there is none, or only what is left of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@dataclass(frozen=True)
class Record:
    """What the file says. `beat` is CLOCK_MONOTONIC, which processes of one machine share; elsewhere it only tells that it has changed."""

    token: int
    holder: Process
    since: float  # seconds since the epoch
    beat: float
    released: bool = False

    @property
    def text(self) -> str:
        return json.dumps({**vars(self), "holder": vars(self.holder)}, indent=1)

    @staticmethod
    def read(text: str, place: str) -> "Record":
        try:
            found = json.loads(text)
            return Record(**{**found, "holder": Process(**found["holder"])})
        except (ValueError, TypeError, KeyError):
            raise _no_lease(place) from None

    def said(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        return f"process {self.holder.pid} on {self.holder.host}, since {since}"


@dataclass(frozen=True)
class Lease:
    """The right to write; without places, of a directory that nobody else knows. Any process that is told of it may check it; the holder renews it."""

    id: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)  # by place: URI of the file

    @property
    def text(self) -> str:
        """For another process of the same run."""
        return json.dumps(vars(self))

    @staticmethod
    def told(text: str) -> "Lease":
        return Lease(**json.loads(text))

    def check(self) -> None:
        """Raises LeaseLost unless it is held. Where the place is remote it is renewed, so that it is held for `SILENT_S` from now."""
        for place in self.tokens:
            if storage.is_local(place):
                self._read(place)
            else:
                self._renew(place)

    @contextlib.contextmanager
    def commit(self, local: bool = False) -> Iterator[None]:
        """Raises LeaseLost unless it is held; while the block runs, nobody can take over what is on this file system. `local`: ask for nothing else,
        which is fast enough for every step."""
        with contextlib.ExitStack() as locks:
            for place in self.tokens:
                if storage.is_local(place):
                    locks.enter_context(_locked(place))
                    self._read(place)
                elif not local:
                    self._renew(place)
            yield

    def renew(self) -> None:
        """A heartbeat. Raises LeaseLost."""
        for place in self.tokens:
            self._renew(place)

    def release(self) -> None:
        """So that the next one need not look whether this one lives."""
        for place in self.tokens:
            try:
                self._renew(place, released=True)
            except LeaseLost:
                pass  # it is another's
            except Exception as error:  # it is then known by this process' end, or by its silence
                print(f"the lease {place} could not be released: {type(error).__name__}: {error}", flush=True)

    def _renew(self, place: str, released: bool = False) -> None:
        while True:
            text, found = self._read(place)
            if _swap(place, Record(found.token, found.holder, found.since, time.monotonic(), released).text, text):
                return

    def _read(self, place: str) -> tuple[str, Record]:
        text = _text(place)
        if text is None:
            raise LeaseLost(f"the lease {place} was removed: another process may take this run over, and this one ends without another write")
        found = Record.read(text, place)
        if (found.holder.id, found.token, found.released) != (self.id, self.tokens[place], False):
            raise LeaseLost(f"this run was taken over by {found.said()} ({place}); this process ends without another write")
        return text, found


UNSHARED = Lease()  # of a directory that no other process knows


@contextlib.contextmanager
def leased(job: Job, run: Path) -> Iterator[Lease]:
    """Hold the lease of the lineage whose directory this is, and of its checkpoints where those are elsewhere. Raises Held."""
    places = [f"{run}/{FILE}", *([f"{job.checkpoint.to.rstrip('/')}/{run.name}/{FILE}"] if job.checkpoint.to else [])]
    me, tokens = Process.this(), dict[str, int]()
    done = threading.Event()
    try:
        for place in places:
            tokens[place] = _take(place, me)
        lease = Lease(me.id, tokens)
        thread = threading.Thread(target=_beat, args=(lease, done), name="ptf-lease", daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            done.set()
            thread.join(BEAT_S)
    finally:
        Lease(me.id, tokens).release()


def _beat(lease: Lease, done: threading.Event) -> None:
    failed = ""
    while not done.wait(BEAT_S):
        try:
            lease.renew()
            failed = ""
        except LeaseLost:
            return  # the next commit says so
        except Exception as error:  # a full disk, a store that is gone: whoever commits will see it too
            if str(error) != failed:
                failed = str(error)
                print(f"no heartbeat of the lease could be written: {type(error).__name__}: {error}", flush=True)


def _take(place: str, me: Process) -> int:
    """The token with which it is now held. Raises Held where another process holds it and lives."""
    watched, ends = None, 0.0
    while True:
        text = _text(place)
        before = None if text is None else Record.read(text, place)
        wanted = Record(before.token + 1 if before else 1, me, time.time(), time.monotonic())
        if before is None or before.released or before.holder.is_gone:
            if _swap(place, wanted.text, text):
                return wanted.token
            continue  # another was first
        if before.holder.is_here:
            silent = time.monotonic() - before.beat > SILENT_S
        else:
            silent = text == watched and time.monotonic() > ends
        if silent:
            if _swap(place, wanted.text, text):
                print(f"taken over from {before.said()}, which gave no heartbeat for {SILENT_S:g} s ({place})", flush=True)
                return wanted.token
            continue
        if before.holder.is_here or watched not in (None, text):
            raise Held(
                f"{place.rsplit('/', 1)[0]} is being written by {before.said()}. Wait for it, or end it (kill {before.holder.pid} on "
                f"{before.holder.host}) and run this again: it takes over at once there, and after {SILENT_S:g} s without a heartbeat elsewhere. "
                f"If that process cannot be reached, remove {place}: it then ends without another write"
            )
        if watched is None:
            print(f"{place} is held by {before.said()}, another machine or container: waiting up to {SILENT_S:g} s for its next heartbeat", flush=True)
            watched, ends = text, time.monotonic() + SILENT_S
        time.sleep(POLL_S)


def _text(place: str) -> str | None:
    try:
        return storage.read_text(place)
    except storage.Missing:
        return None
    except UnicodeDecodeError:
        raise _no_lease(place) from None


def _no_lease(place: str) -> UserError:
    return UserError(f"{place} is not a lease: remove it, if no other process is training this lineage")


def _swap(place: str, text: str, expected: str | None) -> bool:
    """Write if the file still holds `expected`; whether it was written."""
    if not storage.is_local(place):
        return storage.swap_text(place, text, expected) or _text(place) == text  # the answer to our own write may have been lost
    with _locked(place):
        same = _text(place) == expected
        if same:
            storage.write_text(place, text)
    return same


@contextlib.contextmanager
def _locked(place: str) -> Iterator[None]:
    """One process at a time; the lock ends with whoever holds it. Raises Held where one keeps it for longer than any commit takes."""
    file = storage.local_path(place)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    ends = time.monotonic() + SILENT_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    found = _text(place)
                    who = Record.read(found, place).said() if found else "another process"
                    raise Held(f"{place} is locked by {who}, in the middle of a write for {SILENT_S:g} s: if it is stopped, end it") from None
                time.sleep(0.01)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # for a process that was forked meanwhile has the file open, too
        os.close(handle)
