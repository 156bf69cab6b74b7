"""Which rank is alive, and what it is doing: said once a second by the ranks, heard by who started them.

The one idea: a thread of each rank writes a small record into a store that the launcher serves (a `TCPStore`, found through the
environment), so a rank that was stopped is known by its silence and one that hangs by its work not moving, whatever its main thread is in.
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
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

ADDRESS = "PTF_HEARTBEAT"  # host:port of the launcher's store, in a rank's environment
BEAT_S = 1.0
SILENT_S = 7.0  # with a beat and a look once a second, a stopped rank is named within 10 s
STEADY = 3  # times that a rank has been through a phase, after which it is known how long that takes
SLOWER = 3.0  # times the longest of those, the first left out (it may compile)
CONNECT_S = 10.0  # to the launcher
PAUSE_S = 3.0  # between two looks; what is more was a launcher that was stopped itself
LINES, LONG = 5, 300  # that are kept of what a rank prints, and characters of each
BETWEEN = "between phases"
OURS = str(Path(__file__).parents[1])  # which may be installed among the libraries
ELSEWHERE = (*(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")), "<frozen")


class Clock:
    """What a process is doing, and the seconds that each thing took."""

    def __init__(self) -> None:
        self.now, self.since, self.step = BETWEEN, time.monotonic(), 0
        self.times: dict[str, int] = {}  # that each phase was ended
        self.longest: dict[str, float] = {}  # seconds; the first time does not count
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """For as long as the block takes. Phases may stand inside others; each one's seconds are its own."""
        outer = self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, name: str) -> str:
        before, now = self.now, time.monotonic()
        spent = now - self.since
        self._seconds[before] = self._seconds.get(before, 0.0) + spent
        if self.times.get(before):
            self.longest[before] = max(self.longest.get(before, 0.0), spent)
        self.times[before] = self.times.get(before, 0) + 1
        self.now, self.since = name, now
        return before

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, for a row of metrics; `seconds/other` is the time in none."""
        self._enter(self.now)
        taken, self._seconds = self._seconds, {}
        return {"seconds/" + ("other" if name == BETWEEN else name): spent for name, spent in taken.items()}


class Tail:
    """A text stream that remembers its last lines."""

    def __init__(self, stream: TextIO, lines: deque[str]) -> None:
        self._stream, self._lines, self._open = stream, lines, ""

    def write(self, text: str) -> int:
        *whole, last = (self._open + text).replace("\r", "\n").split("\n")
        self._lines.extend(line[:LONG] for line in whole if line.strip())
        self._open = last[:LONG]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def beating(clock: Clock, rank: int) -> Iterator[None]:
    """Say once a second what this process is doing, where a launcher listens. Called by the main thread, whose place is said too."""
    address = os.environ.get(ADDRESS)
    if address is None:
        yield
        return
    from torch.distributed import TCPStore  # here, because processes without torch import who imports this

    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        print(f"rank {rank} cannot reach {address}, where its launcher listens for what it is doing; it works unheard ({error})", flush=True)
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
                "number": number, "ended": last, "step": clock.step, "phase": (now := clock.now), "for_s": time.monotonic() - clock.since,
                "times": clock.times.get(now, 0), "longest_s": clock.longest.get(now, 0.0), "where": place(worker), "lines": list(lines),
            }  # fmt: skip
            with contextlib.suppress(RuntimeError):  # the launcher is gone, and this process soon after
                store.set(str(rank), json.dumps(record))

    thread = threading.Thread(target=beat, name="ptf-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stdout, sys.stderr = streams


def place(thread: int) -> str:
    """file:line and function of our or the user's code that a thread is in, or waits for."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not (file := frame.f_code.co_filename).startswith(OURS) and file.startswith(ELSEWHERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "nowhere of its own"


class Monitor:
    """The launcher's side. `name` is what all ranks together are called."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        from torch.distributed import TCPStore

        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self.name, self.address = name, f"{host}:{port}"
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), timeout=timedelta(seconds=30)
        )
        self._heard: dict[int, tuple[int, float]] = {}  # the number of the last beat, and when it was first heard
        self._last: dict[int, dict[str, Any]] = {}
        self._told: dict[int, str] = {}  # what is said of a rank now
        self._looked, self._watched = time.monotonic(), 0.0  # seconds in which this process could hear

    def look(self, ranks: Sequence[int]) -> list[str]:
        """What there is to say about ranks that should be working, once for each time that it happens: gone silent, back again, or not moving."""
        if self._store is None:
            return []
        news, still, now = [], [], time.monotonic()
        self._watched += min(now - self._looked, PAUSE_S)
        self._looked = now
        for rank in ranks:
            if not self._store.check([str(rank)]):
                continue  # it has not begun
            beat = self._last[rank] = json.loads(self._store.get(str(rank)))
            if rank not in self._heard or self._heard[rank][0] != beat["number"]:
                self._heard[rank] = (beat["number"], self._watched)
            if beat["ended"]:
                continue
            said = self._told.get(rank)
            if self.silence(rank) > SILENT_S:
                if said != "silent":
                    news.append(f"{self.name} rank {rank} has not answered for {self.silence(rank):.0f} s (stopped, or its machine is){self.about(rank)}")
                    self._told[rank] = "silent"
            elif beat["phase"] != BETWEEN and beat["times"] >= STEADY and beat["for_s"] > max(SILENT_S, SLOWER * beat["longest_s"]):
                if said != "still":
                    still.append(rank)
                    self._told[rank] = "still"
            elif said:
                news.append(f"{self.name} rank {rank} goes on")
                del self._told[rank]
        if still:
            news.append(f"{self.name}: not moving, longer than ever before (a rank that waits for another hangs with it)")
            news += [f"  rank {rank}{self.about(rank)}" for rank in still[:8]]
        return news

    def close(self) -> None:
        """Listen no longer. A store that is left to the garbage collector may be collected in a process that was forked, where its thread is not."""
        self._store = None

    def silence(self, rank: int) -> float:
        """Seconds since a rank was last heard of; 0 before its first beat and after its last."""
        return self._watched - self._heard[rank][1] if rank in self._heard and not self._last[rank]["ended"] else 0.0

    def about(self, rank: int) -> str:
        """What a rank was doing when last heard of, and its last lines; empty before its first beat."""
        if not (beat := self._last.get(rank)):
            return ""
        lines = "".join(f"\n    | {line}" for line in beat["lines"])
        return f": step {beat['step']}, {beat['phase']} for {beat['for_s']:.0f} s, at {beat['where']}" + (f"; its last lines:{lines}" if lines else "")
