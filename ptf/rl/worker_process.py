"""A process for users' code, rewards and environments: many calls at once. If a call raises, hangs, or ends its
process, the caller gets a `Fault` with the reason, and no other call does.

Each call has its own time limit, from the moment when the process begins it. A process that does not keep to it, or
whose messages cannot be read, is killed with all processes that it has started. If several calls were in flight then,
each is made again with nothing beside it, so that the one at fault is known.

The process ends with the thread that started it (ptf.compute.launch.start): that of its `WorkerProcess`, which sends,
receives, and watches the limits.
"""

import contextlib
import math
import multiprocessing.connection as mpc
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ptf.compute.launch import start
from ptf.config import Plugin, plugin
from ptf.errors import UserError
from ptf.rl.worker_messages import LEFT, READY, REPLY, STARTED, Fault, Interrupted

STARTS_WITHIN_S = 60.0
GRACE_S = 2.0  # beyond its limit, for a call that the process ends itself
AHEAD = 256  # calls that a process has received and not begun
# the same if others take from its queue too: of a process with one call at a time, and of one with many
AHEAD_OF_MANY = {False: 2, True: 8}
IDLE_S = 600.0  # longest wait of the thread for something to happen


@dataclass(eq=False)
class QueuedCall:
    """A question and the future of its reply."""

    question: Any
    alone: bool = False  # whether no other call may be in flight with it
    future: "Future[Any]" = field(default_factory=Future)
    unheard: int = 0  # how often its process ended before it began the call
    ends: float | None = None  # the end of its time, once the process has begun it

    def resolve(self, reply: Any) -> None:
        """Set the reply, unless the caller waits no longer."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(reply)


@dataclass(eq=False)
class CallQueue:
    """Calls that wait for a process. Several processes may take from one queue."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: deque[QueuedCall] = field(default_factory=deque)
    takers: "list[WorkerProcess]" = field(default_factory=list)

    def put(self, call: QueuedCall, *, first: bool = False) -> None:
        """Add a call, and wake the processes that take from the queue."""
        with self.lock:
            (self.calls.appendleft if first else self.calls.append)(call)
        for taker in self.takers:
            taker.wake()

    def take(self, *, alone: bool | None = None) -> QueuedCall | None:
        """Return the first call that is still wanted; with `alone`, only if it is such a call, or is not."""
        with self.lock:
            while self.calls and self.calls[0].future.cancelled():
                self.calls.popleft()
            if self.calls and alone in (None, self.calls[0].alone):
                return self.calls.popleft()
        return None


class WorkerProcess:
    """One process that serves a plugin as `kind`, "reward" or "environment", from a queue. It starts with the first
    question, and the next one after it died.

    A call of a reward that its process lost is made again. The state of environments is lost with their process, so
    such a call has the result `Interrupted`.
    """

    def __init__(self, kind: str, what: Plugin, timeout_s: float, calls: CallQueue | None = None) -> None:
        plugin.bind(what)  # raises here, in this process, if the name cannot be resolved
        self.kind, self.what, self.timeout_s = kind, what, timeout_s
        self.queue = calls or CallQueue()
        self.queue.takers.append(self)
        self.process: subprocess.Popen | None = None
        self.pipe: mpc.Connection | None = None
        self.number = 0
        self.calls = dict[int, QueuedCall]()  # that the process has
        self.heard = 0.0  # when the last message came, or the first call was sent
        self.is_crowded = False  # whether calls took too long in it beside others
        self.ends_in_time = False  # whether the process itself ends calls that take too long
        self.closing = False
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.waker, self.woken = mpc.Pipe(duplex=False)
        self.is_woken = False  # whether `waker` has something to read

    def ask(self, question: Any, *, alone: bool = False) -> "Future[Any]":
        """Ask a question; the result is the reply, a Fault, or Interrupted."""
        call = QueuedCall(question, alone)
        self.queue.put(call)
        return call.future

    def wake(self) -> None:
        """Let the thread look at the queue; the first call starts it."""
        if self.closing or self.failure:
            self._fail([])
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True, name=f"ptf-{self.kind}")
            self.thread.start()
        if not self.is_woken:
            self.is_woken = True
            self.woken.send_bytes(b"")

    def close(self) -> None:
        """End the process and its thread."""
        if self.thread is not None and not self.closing:
            self.closing = True
            self.woken.send_bytes(b"")
            self._end_process()
            self.thread.join(10)
        self.closing = True
        self.waker.close()
        self.woken.close()

    def _work(self) -> None:
        """Send, receive and watch, until `close`."""
        try:
            while not self.closing:
                self._receive()  # before the limit, because what arrived in time is in time
                end, wrong = self._limit()
                if end <= time.monotonic():
                    self._end(f"{wrong} {self.timeout_s:g} s")
                self._send()
                pipes, left = [self.waker, *filter(None, [self.pipe])], self._limit()[0] - time.monotonic()
                if self.waker in mpc.wait(pipes, min(max(0.0, left), IDLE_S)):
                    self.waker.recv_bytes()
                    self.is_woken = False  # before the queue is looked at
        except BaseException as error:  # no call may wait for ever
            self.failure = error
            raise
        finally:
            calls = list(self.calls.values())
            self._kill()
            self._fail(calls)

    def _fail(self, calls: list[QueuedCall]) -> None:
        """End calls whose process is closed; those of the queue too, if no other process takes them."""
        if all(taker.closing or taker.failure for taker in self.queue.takers):
            while (call := self.queue.take()) is not None:
                calls.append(call)
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(RuntimeError(f"the {self.kind}'s process was closed: {self.failure}"))

    def _limit(self) -> tuple[float, str]:
        """Return when the process is killed, and why: a call is beyond its time, or the process does not begin one."""
        if ends := [call.ends for call in self.calls.values() if call.ends is not None]:
            return min(ends), "took longer than"
        return self.heard + self.timeout_s if self.calls else math.inf, "did not listen for"

    def _send(self) -> None:
        """Send calls of the queue, as many as the process takes."""
        while not self.closing:
            free, ahead = not self.calls, AHEAD
            if len(self.queue.takers) > 1:
                ahead = AHEAD_OF_MANY[self.ends_in_time]
            has_alone = any(call.alone for call in self.calls.values())
            if not free and (has_alone or sum(call.ends is None for call in self.calls.values()) >= ahead):
                return
            # a call that must be alone waits until no other is in flight
            if (call := self.queue.take(alone=None if free else False)) is None:
                return
            if call.alone and self.is_crowded:  # threads that took too long may still compute in it
                self._kill()
            if self.pipe is None and not self._start(call):
                continue
            self.number += 1
            if free:
                self.heard = time.monotonic()
            self.calls[self.number], call.ends = call, None
            self._write(self.number, call)
            self._receive()

    def _write(self, number: int, call: QueuedCall) -> None:
        assert self.pipe is not None
        try:
            message = pickle.dumps((number, pickle.dumps(call.question)))
        except Exception as error:
            self._finish(number, Fault(f"it cannot be asked: {type(error).__name__}: {error}"))
            return
        try:
            self.pipe.send_bytes(message)
        except OSError as error:  # it died, or does not read
            reason = f"did not listen for {self.timeout_s:g} s" if isinstance(error, BlockingIOError) else ""
            self._receive()  # what it said before, to its end
            if self.pipe is not None:
                self._end(reason)

    def _start(self, call: QueuedCall) -> bool:
        """Start the process for a call; if it does not start, the call raises UserError. Return whether it runs."""
        ours, theirs = mpc.Pipe()
        with theirs:
            number = theirs.fileno()
            self.process = start(
                "ptf.rl.worker_server",
                [str(number)],
                {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                pass_fds=[number],
                start_new_session=True,
            )
        self.pipe = ours
        # the pipe raises BlockingIOError if the process takes or gives nothing for this time: it may stop in the middle
        # of a message
        limit = struct.pack("ll", int(self.timeout_s), max(1, int(self.timeout_s % 1 * 1e6)))
        with socket.socket(fileno=os.dup(ours.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, limit)
        kind = ""
        with contextlib.suppress(EOFError, OSError):
            ours.send((self.kind, self.what.model_dump(), self.timeout_s))
            if ours.poll(STARTS_WITHIN_S):
                kind, _, self.ends_in_time = ours.recv()
        if kind == READY:
            return True
        self._kill()
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(
                UserError(
                    f"the process for the {self.kind} {self.what.use} died or did not start in "
                    f"{STARTS_WITHIN_S:g} s; see its output above"
                )
            )
        return False

    def _receive(self) -> None:
        while self.pipe is not None:
            try:
                if not self.pipe.poll():
                    return
                kind, number, value = self.pipe.recv()
            except (EOFError, OSError) as error:
                self._end(f"took longer than {self.timeout_s:g} s" if isinstance(error, BlockingIOError) else "")
                return
            except Exception as error:  # unpickling may raise anything
                self._end(f"its reply cannot be read: {type(error).__name__}: {error}")
                return
            self.heard = time.monotonic()
            known = number in self.calls
            if kind == STARTED and known:
                self.calls[number].ends = time.monotonic() + self.timeout_s + GRACE_S * self.ends_in_time
            elif kind == REPLY and known:
                self._finish(number, value)
            elif kind == LEFT:
                self._end("", blames=False)
            else:
                said = f"answered question {number} twice (does it fork?)"
                print(f"the process of the {self.kind} {self.what.use} {said}; it is replaced", flush=True)
                self._end(said, blames=False)

    def _finish(self, number: int, reply: Any) -> None:
        call = self.calls.pop(number)
        crowded = isinstance(reply, Fault) and reply.crowded
        self.is_crowded |= crowded
        if crowded and not call.alone:
            self._repeat(call, alone=True)
        else:
            call.resolve(reply)

    def _repeat(self, call: QueuedCall, alone: bool) -> None:
        """Make a call again; one of an environment, whose state may be lost, is made again by its caller."""
        if self.kind == "environment":
            call.resolve(Interrupted(suspect=alone))
            return
        call.alone |= alone
        self.queue.put(call, first=True)

    def _end(self, reason: str, *, blames: bool = True) -> None:
        """Kill the process; a call that was alone in it is at fault, and others are lost or made again.

        `reason` is empty for a process that died; `blames`: whether a call that is in flight can be at fault.
        """
        begun = [call for call in self.calls.values() if call.ends is not None]
        sent = [call for call in self.calls.values() if call.ends is None]
        self._kill()
        fault = Fault(reason or f"the {self.kind}'s process died", fatal=True)
        if blames and len(begun) == 1:
            begun.pop().resolve(fault)
        elif blames and not begun and len(sent) == 1 and sent[0].unheard:  # for the second time
            sent.pop().resolve(fault)
        for call, suspect in reversed([*((call, blames) for call in begun), *((call, False) for call in sent)]):
            call.unheard += blames and not suspect
            self._repeat(call, alone=suspect or call.unheard > 1)

    def _end_process(self) -> None:
        if process := self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills the processes that it has started

    def _kill(self) -> None:
        """End the process, if there is one; the next question starts a new one."""
        if self.pipe:
            self.pipe.close()
        if self.process:
            self._end_process()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.pipe = self.process = None
        self.calls, self.is_crowded = {}, False
