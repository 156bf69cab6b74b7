"""One writer per training run: a lease that the process which trains, evaluates or publishes a run holds, and that
every commit checks.

The lease is a small file beside what it protects, replaced only by compare-and-swap (a lock of the file system; a
conditional PUT in an object store). Each change of the holder raises its token; a process whose token is no longer in
the file has lost the lease and writes nothing more.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ptf import storage
from ptf.config import Job
from ptf.errors import UserError
from ptf.workspace.locks import locked

FILE = "lease.json"
BEAT_S = 5.0  # between heartbeats
SILENT_S = 30.0  # without a heartbeat, after which the lease may be taken over
POLL_S = 1.0  # between two reads of a lease that another machine holds


class RunInUse(UserError):
    """Another process holds the lease; the message names it, since when, and how to take over."""


class LeaseLost(UserError):
    """Another process has taken the lease over, or somebody removed it; this process must not write any more."""


@dataclass(frozen=True)
class Process:
    """The holder of a lease.

    Two processes are on one machine if boot id and PID namespace are the same (containers share the former).
    """

    id: str
    host: str
    pid: int
    started: int  # clock ticks after the boot: a pid alone may have been given to another process since
    boot: str
    namespace: str

    @staticmethod
    def this() -> "Process":
        """Return this process, with a new id."""
        pid = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:  # no Linux: nothing is known of other processes, and only heartbeats count
            boot = namespace = ""
        return Process(uuid.uuid4().hex, socket.gethostname(), pid, _started(pid) or 0, boot, namespace)

    def is_beside(self, other: "Process") -> bool:
        """Return whether the other process is on the same machine."""
        return bool(self.boot) and (self.boot, self.namespace) == (other.boot, other.namespace)


def _started(pid: int) -> int | None:
    """Return when a process began, in clock ticks after the boot; None if it does not exist or has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@dataclass(frozen=True)
class Record:
    """The content of the lease file.

    `beat` is CLOCK_MONOTONIC, which processes of one machine share; on other machines only its changes count.
    """

    token: int
    holder: Process
    since: float  # seconds since the epoch
    beat: float
    released: bool = False

    @property
    def text(self) -> str:
        """The record as JSON."""
        return json.dumps({**vars(self), "holder": vars(self.holder)}, indent=1)

    @staticmethod
    def read(uri: str) -> "tuple[str | None, Record | None]":
        """Return the file's text and what it says; None for both where there is no file.

        Raises UserError if it is not a lease.
        """
        try:
            text = storage.read_text(uri)
        except storage.Missing:
            return None, None
        except UnicodeDecodeError:
            text = ""
        try:
            fields = json.loads(text)
            return text, Record(**{**fields, "holder": Process(**fields["holder"])})
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{uri} is not a lease: remove it, if no other process is training this run") from None

    def holder_text(self) -> str:
        """Return the holder and the time since when, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        return f"process {self.holder.pid} on {self.holder.host}, since {since}"


@dataclass(frozen=True)
class Lease:
    """The exclusive right to write a run. Without `tokens` it is for a directory that no other process knows.

    Any process of the run that has its fields may check it; the holder renews it.
    """

    id: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)  # by URI of the lease file

    def check(self) -> None:
        """Raise LeaseLost unless the lease is held.

        In an object store it is renewed, so that it is held for `SILENT_S` from now.
        """
        for uri in self.tokens:
            if storage.is_local(uri):
                self._read(uri)
            else:
                self.renew(uri)

    @contextlib.contextmanager
    def commit(self, local: bool = False) -> Iterator[None]:
        """Raise LeaseLost unless the lease is held; while the block runs, nobody can take over what is on this file
        system.

        With `local`, object stores are not asked, which is fast enough for every step.
        """
        with contextlib.ExitStack() as locks:
            for uri in self.tokens:
                if storage.is_local(uri):
                    locks.enter_context(_locked(uri))
                    self._read(uri)
                elif not local:
                    self.renew(uri)
            yield

    def release(self) -> None:
        """Mark the lease as free, so that the next holder need not wait for a missing heartbeat."""
        for uri in self.tokens:
            try:
                self.renew(uri, released=True)
            except LeaseLost:
                pass  # another process holds it
            except Exception as error:  # the next holder then waits for this process's end, or for missing heartbeats
                print(f"the lease {uri} could not be released: {type(error).__name__}: {error}", flush=True)

    def renew(self, uri: str, released: bool = False) -> None:
        """Write a heartbeat, or that the lease is free. Raises LeaseLost."""
        while True:
            text, record = self._read(uri)
            if _swap(uri, replace(record, beat=time.monotonic(), released=released).text, text):
                return

    def _read(self, uri: str) -> tuple[str, Record]:
        text, record = Record.read(uri)
        if text is None or record is None:
            raise LeaseLost(
                f"the lease {uri} was removed: another process may take this run over, "
                "and this one ends without another write"
            )
        if (record.holder.id, record.token, record.released) != (self.id, self.tokens[uri], False):
            raise LeaseLost(
                f"this run was taken over by {record.holder_text()} ({uri}); this process ends without another write"
            )
        return text, record


UNSHARED = Lease()  # of a directory that no other process knows


@contextlib.contextmanager
def hold_lease(job: Job, run: Path) -> Iterator[Lease]:
    """Hold the lease of the run in this directory, and of its checkpoints if those are elsewhere.

    Raises RunInUse if another process holds it.
    """
    uris = [f"{run}/{FILE}", *([f"{job.checkpoint.to.rstrip('/')}/{run.name}/{FILE}"] if job.checkpoint.to else [])]
    process, tokens = Process.this(), dict[str, int]()
    done = threading.Event()
    try:
        for uri in uris:
            tokens[uri] = _take(uri, process)
        lease = Lease(process.id, tokens)
        thread = threading.Thread(target=_beat, args=(lease, done), name="ptf-lease", daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            done.set()
            thread.join(BEAT_S)
    finally:
        Lease(process.id, tokens).release()


def _beat(lease: Lease, done: threading.Event) -> None:
    failed = ""
    while not done.wait(BEAT_S):
        try:
            for uri in lease.tokens:
                lease.renew(uri)
            failed = ""
        except LeaseLost:
            return  # the next commit raises it
        except Exception as error:  # a full disk, an unreachable store: the next commit will fail too
            if str(error) != failed:
                failed = str(error)
                print(f"no heartbeat of the lease could be written: {type(error).__name__}: {error}", flush=True)


def _take(uri: str, process: Process) -> int:
    """Take the lease and return its token. Raises RunInUse if another process holds it and is alive."""
    watched, ends = None, 0.0
    while True:
        text, before = Record.read(uri)
        record = Record(before.token + 1 if before else 1, process, time.time(), time.monotonic())
        # that a holder has ended only its own machine knows
        if (
            before is None
            or before.released
            or (before.holder.is_beside(process) and _started(before.holder.pid) != before.holder.started)
        ):
            if _swap(uri, record.text, text):
                return record.token
            continue  # another process was first
        if before.holder.is_beside(process):
            silent = time.monotonic() - before.beat > SILENT_S
        else:
            silent = text == watched and time.monotonic() > ends
        if silent:
            if _swap(uri, record.text, text):
                print(
                    f"taken over from {before.holder_text()}, which gave no heartbeat for {SILENT_S:g} s ({uri})",
                    flush=True,
                )
                return record.token
            continue
        if before.holder.is_beside(process) or watched not in (None, text):
            raise RunInUse(
                f"{uri.rsplit('/', 1)[0]} is being written by {before.holder_text()}. Wait for it, "
                f"or end it (kill {before.holder.pid} on "
                f"{before.holder.host}) and run this again: it takes over at once there, "
                f"and after {SILENT_S:g} s without a heartbeat elsewhere. "
                f"If that process cannot be reached, remove {uri}: it then ends without another write"
            )
        if watched is None:
            print(
                f"{uri} is held by {before.holder_text()}, another machine or container: "
                f"waiting up to {SILENT_S:g} s for its next heartbeat",
                flush=True,
            )
            watched, ends = text, time.monotonic() + SILENT_S
        time.sleep(POLL_S)


def _swap(uri: str, text: str, expected: str | None) -> bool:
    """Write the text if the file still holds `expected`; return whether it was written."""
    if not storage.is_local(uri):
        # the response to this process's own write may have been lost
        return storage.swap_text(uri, text, expected) or Record.read(uri)[0] == text
    with _locked(uri):
        is_expected = Record.read(uri)[0] == expected
        if is_expected:
            storage.write_text(uri, text)
    return is_expected


@contextlib.contextmanager
def _locked(uri: str) -> Iterator[None]:
    """Hold the file's lock, one process at a time; it ends with its holder.

    Raises RunInUse if another process keeps it for longer than any commit takes.
    """
    file = storage.local_path(uri)
    with locked(file.with_name(f".{file.name}.lock"), SILENT_S) as is_held:
        if not is_held:
            record = Record.read(uri)[1]
            holder = record.holder_text() if record else "another process"
            raise RunInUse(
                f"{uri} is locked by {holder}, in the middle of a write for {SILENT_S:g} s: if it is stopped, end it"
            )
        yield
