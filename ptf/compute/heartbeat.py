"""Heartbeats: the ranks report once a second what they are doing, and the launcher finds those that are silent or
stuck.

A thread of each rank writes a small record into a store that the launcher serves (a `TCPStore`, found through the
environment), so a rank that was stopped is recognised by its silence and one that hangs by its phase not ending,
whatever its main thread waits for.
"""

import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from ptf.workspace import progress

ADDRESS = "PTF_HEARTBEAT"  # host:port of the launcher's store, in a rank's environment
BEAT_S = 1.0
SILENT_S = 7.0  # with a heartbeat and a check once a second, a stopped rank is reported within 10 s
STEADY = 3  # runs of a phase after which its usual time is known
SLOWER = 3.0  # multiple of the longest of those, without the first (it may compile)
CONNECT_S = 10.0  # to the launcher
PAUSE_S = 3.0  # between two checks; a longer gap means that the launcher itself was stopped
LINES, LONG = 5, 300  # how many last lines of a rank are kept, and characters of each
BETWEEN = "between phases"
OURS = str(Path(__file__).parents[1])  # ptf may be installed among the libraries
ELSEWHERE = (*(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")), "<frozen")


@dataclass(eq=False)
class Clock:
    """The phase that a process is in, and the seconds that each phase took."""

    now: str = BETWEEN
    since: float = field(default_factory=time.monotonic)
    step: int = 0
    runs: dict[str, int] = field(default_factory=dict)  # how often each phase ended
    longest: dict[str, float] = field(default_factory=dict)  # seconds, without the first time
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase for as long as the block runs. Phases may be nested; the seconds of an inner one do not count
        for the outer."""
        outer = self._enter(name)
        try:
            with progress.phase(name):
                yield
        finally:
            self._enter(outer)

    def _enter(self, name: str) -> str:
        before, now = self.now, time.monotonic()
        spent = now - self.since
        self._seconds[before] = self._seconds.get(before, 0.0) + spent
        if self.runs.get(before):
            self.longest[before] = max(self.longest.get(before, 0.0), spent)
        self.runs[before] = self.runs.get(before, 0) + 1
        self.now, self.since = name, now
        return before

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, for a row of metrics; `seconds/other` is the time in no
        phase."""
        self._enter(self.now)
        seconds, self._seconds = self._seconds, {}
        return {"seconds/" + ("other" if name == BETWEEN else name): spent for name, spent in seconds.items()}


class Tail:
    """A text stream that remembers its last lines."""

    def __init__(self, stream: TextIO, lines: deque[str]) -> None:
        self._stream, self._lines, self._open = stream, lines, ""

    def write(self, text: str) -> int:
        """Write the text and remember its last lines."""
        *complete, last = (self._open + text).replace("\r", "\n").split("\n")
        self._lines.extend(line[:LONG] for line in complete if line.strip())
        self._open = last[:LONG]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def beating(clock: Clock, rank: int) -> Iterator[None]:
    """Report once a second what this process is doing, if a launcher listens.

    The main thread calls it, and its place in the code is reported too.
    """
    address = os.environ.get(ADDRESS)
    if address is None:
        yield
        return
    from torch.distributed import TCPStore  # here, because processes without torch import this module indirectly

    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        print(
            f"rank {rank} cannot reach its launcher at {address}, "
            f"so nothing would notice if it hung or its machine failed ({error})",
            flush=True,
        )
        yield
        return
    lines: deque[str] = deque(maxlen=LINES)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Tail(sys.stdout, lines), Tail(sys.stderr, lines)
    ended, worker = threading.Event(), threading.get_ident()

    def beat() -> None:
        number, last = 0, False
        while not last:
            last = ended.wait(BEAT_S if number else 0.0)
            number += 1
            record = {
                "number": number,
                "ended": last,
                "step": clock.step,
                "phase": (now := clock.now),
                "for_s": time.monotonic() - clock.since,
                "times": clock.runs.get(now, 0),
                "longest_s": clock.longest.get(now, 0.0),
                "where": code_location(worker),
                "lines": list(lines),
            }
            with contextlib.suppress(RuntimeError):  # the launcher has ended, and this process will soon
                store.set(str(rank), json.dumps(record))

    thread = threading.Thread(target=beat, name="ptf-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stdout, sys.stderr = streams


def code_location(thread: int) -> str:
    """Return file:line and function, in ptf's or the user's code, where a thread is or waits."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not (file := frame.f_code.co_filename).startswith(OURS) and file.startswith(ELSEWHERE):
        frame = frame.f_back
    return (
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame
        else "no code of ptf or of the user"
    )


class Monitor:
    """The launcher's side of the heartbeats. `name` stands for all ranks in messages."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        from torch.distributed import TCPStore

        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self.name, self.address = name, f"{host}:{port}"
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=30),
        )
        self._heard: dict[int, tuple[int, float]] = {}  # number of the last heartbeat, and when it first arrived
        self._last: dict[int, dict[str, Any]] = {}
        self._state: dict[int, str] = {}  # what was last reported of a rank
        self._looked = time.monotonic()
        self._watched = 0.0  # seconds in which this process could receive

    def poll(self, ranks: Sequence[int]) -> list[str]:
        """Return messages about ranks that should be working: silent, answering again, or stuck.

        Each event is reported once.
        """
        if self._store is None:
            return []
        messages, stuck, now = [], [], time.monotonic()
        self._watched += min(now - self._looked, PAUSE_S)
        self._looked = now
        for rank in ranks:
            if not self._store.check([str(rank)]):
                continue  # it has sent no heartbeat yet
            beat = self._last[rank] = json.loads(self._store.get(str(rank)))
            if rank not in self._heard or self._heard[rank][0] != beat["number"]:
                self._heard[rank] = (beat["number"], self._watched)
            if beat["ended"]:
                continue
            state = self._state.get(rank)
            if self.silent_seconds(rank) > SILENT_S:
                if state != "silent":
                    messages.append(
                        f"{self.name} rank {rank} has not answered for {self.silent_seconds(rank):.0f} s: the process "
                        f"may be suspended, or its machine or network down{self.describe(rank)}"
                    )
                    self._state[rank] = "silent"
            elif (
                beat["phase"] != BETWEEN
                and beat["times"] >= STEADY
                and beat["for_s"] > max(SILENT_S, SLOWER * beat["longest_s"])
            ):
                if state != "stuck":
                    stuck.append(rank)
                    self._state[rank] = "stuck"
            elif state:
                messages.append(f"{self.name} rank {rank} continues")
                del self._state[rank]
        if stuck:
            messages.append(
                f"{self.name}: these ranks seem to be stuck, each in one phase for more than {SLOWER:g} times as long "
                "as ever before (ranks that only wait for a stuck rank are listed, too)"
            )
            messages += [f"  rank {rank}{self.describe(rank)}" for rank in stuck[:8]]
        return messages

    def close(self) -> None:
        """Stop listening.

        A store that is left to the garbage collector may be collected in a forked process, which has no copy of its
        thread.
        """
        self._store = None

    def silent_seconds(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat; 0 before its first and after its last."""
        return self._watched - self._heard[rank][1] if rank in self._heard and not self._last[rank]["ended"] else 0.0

    def describe(self, rank: int) -> str:
        """Return what a rank was doing at its last heartbeat, and its last lines; empty before its first."""
        if not (beat := self._last.get(rank)):
            return ""
        lines = "".join(f"\n    | {line}" for line in beat["lines"])
        return f": step {beat['step']}, {beat['phase']} for {beat['for_s']:.0f} s, at {beat['where']}" + (
            f"; its last lines:{lines}" if lines else ""
        )
