"""A process for code that is not ours: rewards and environments. It may raise, hang, stop or die, and what asked it gets a `Fault` with the reason.

The one idea: every reply has a deadline and bears the number of its question; a process that misses the deadline, or whose replies cannot be read or are
another question's, is killed with all it has started, and the next question starts another. It ends with the thread that started it, so that must be a
lasting one. Run as a program (by ptf.entry) it is the process: it answers (pickled) questions from a pipe until the pipe closes.
"""

import asyncio
import contextlib
import itertools
import math
import multiprocessing.connection as mpc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.compute.launch import start
from ptf.config import Plug, plug
from ptf.data.trajectory import MOST_REWARD, is_reward
from ptf.errors import UserError
from ptf.rl import at_once

STARTS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """There is no answer, and why."""

    reason: str
    fatal: bool = False  # the process is gone, and whatever it held


class Deadline:
    """Calls `act` from a thread of its own where a block under `set` takes longer than `after_s`."""

    def __init__(self, after_s: float, act: Callable[[], None]) -> None:
        self.after_s, self.act, self.at, self.passed, self.over = after_s, act, math.inf, False, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # it wakes at least every `after_s`, hence before any deadline that was set since
        while not self.over.wait(max(0.0, min(self.at - time.monotonic(), self.after_s))):
            if time.monotonic() >= self.at:
                self.passed = True
                self.act()
                return

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        self.at = time.monotonic() + self.after_s
        try:
            yield
        finally:
            self.at = math.inf

    def close(self) -> None:
        self.over.set()


class Child:
    """One process that serves `what` as `kind`: "reward" or "environment". It starts with the first question."""

    def __init__(self, kind: str, what: Plug, timeout_s: float) -> None:
        plug.bind(what)  # a name that does not resolve is an error now, in this process
        self.kind, self.what, self.timeout_s = kind, what, timeout_s
        self.asked = 0  # questions that the process was sent
        self.process: subprocess.Popen | None = None
        self.pipe: mpc.Connection | None = None

    def _start(self) -> mpc.Connection:
        ours, theirs = mpc.Pipe()
        with theirs:
            number = theirs.fileno()
            environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
            self.process = start("ptf.rl.child", [str(number)], environment, pass_fds=[number], start_new_session=True)
        self.pipe, self.asked = ours, 0
        try:
            ours.send((self.kind, self.what.model_dump()))
            ready = ours.poll(STARTS_WITHIN_S) and ours.recv() == "ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise UserError(f"the process for the {self.kind} {self.what.use} died or did not start in {STARTS_WITHIN_S:g} s; its lines above say why")
        return ours

    def replies(self, questions: Sequence[Any]) -> Iterator[Any]:
        """What it says to each, in order; a fatal Fault is the last. All questions are sent ahead, so it never waits for the next."""
        # a process that was dead before it read anything is replaced and gets the same questions, where it holds nothing that they refer to
        for fresh in (self.pipe is None or self.kind == "environment", True):
            pipe, answered, doing = self.pipe or self._start(), 0, "did not listen for"
            first, self.asked = self.asked, self.asked + len(questions)
            deadline = Deadline(self.timeout_s, self._kill)  # which ends what waits for the process
            try:
                with deadline.set():
                    pipe.send(list(questions))
                doing = "took longer than"
                while answered < len(questions):
                    if not pipe.poll(self.timeout_s):
                        yield self._ended(f"{doing} {self.timeout_s:g} s")
                        return
                    with deadline.set():  # it may stop in the middle of an answer
                        number, reply = pipe.recv()
                    if number != first + answered:
                        yield self._ended(f"answered out of turn, to question {number} and not {first + answered} (does it fork?)")
                        return
                    answered += 1
                    yield reply
                return
            except (EOFError, OSError):
                self.close()
                if fresh or answered or deadline.passed:
                    yield self._ended(f"{doing} {self.timeout_s:g} s" if deadline.passed else f"the {self.kind}'s process died")
                    return
            except Exception as error:  # of whatever is unpickled
                yield self._ended(f"answered with what cannot be read: {type(error).__name__}: {error}")
                return
            finally:
                deadline.close()

    def _ended(self, why: str) -> Fault:
        self.close()
        return Fault(why, fatal=True)

    def ask(self, question: Any) -> Any:
        """Its reply, or a Fault."""
        return next(self.replies([question]))

    def _kill(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what it has started dies with it

    def close(self) -> None:
        if self.pipe:
            self.pipe.close()
        if self.process:
            self._kill()
            self.process.wait(10)
        self.pipe = self.process = None


def reward_of(what: Plug) -> Callable[[Any], Any]:
    """Questions are (row, text); the reply is a number, or a Fault. A coroutine function where the reward is one."""
    function = at_once.asynchronous(what)
    at_once.first_lines(what)  # what it finds out of this machine is known before the first question, which has a deadline

    def checked(value: Any) -> float | Fault:
        if isinstance(value, str | bytes | bytearray):  # of which float() would read some
            return Fault(f"the reward is {str(value)[:60]!r}, a text and not a number")
        value = float(value)
        return value if is_reward(value) else Fault(f"the reward is {value}, not a number from -{MOST_REWARD:g} to {MOST_REWARD:g}")

    async def answer_later(question: tuple[Mapping[str, Any], str]) -> float | Fault:
        return checked(await function(*question))

    def answer(question: tuple[Mapping[str, Any], str]) -> float | Fault:
        return checked(function(*question))

    answer_later.in_flight = at_once.in_flight(function)  # type: ignore[attr-defined]
    return answer_later if at_once.is_asynchronous(function) else answer


def environment_of(what: Plug) -> Callable[[Any], Any]:
    """Questions are ("begin", episode, row, seed), ("act", episode, text) and ("end", episode)."""
    make, played = plug.bind(what), dict[int, Any]()

    def answer(question: tuple) -> Any:
        verb, episode, *rest = question
        if verb == "begin":
            row, seed = rest
            made = make(row, seed)
            shown = list(made.begin())
            played[episode] = made
            return shown, getattr(made, "tools", None)
        if verb == "act":
            return played[episode].act(*rest)
        played.pop(episode, None)
        return None

    return answer


def serve(pipe: mpc.Connection) -> None:
    """The process's loop. It ends with the process that started it (ptf.entry), even while what it serves hangs."""
    kind, what = pipe.recv()
    answer = {"reward": reward_of, "environment": environment_of}[kind](Plug(**what))
    pipe.send("ready")
    asked = 0
    while True:
        try:
            questions = pipe.recv()
        except EOFError:
            return
        numbers = itertools.count(asked)
        asked += len(questions)
        if at_once.is_asynchronous(answer):
            asyncio.run(_many(pipe, answer, questions, numbers))
            continue
        for question in questions:
            try:
                reply = answer(question)
            except Exception as error:  # whatever it does wrong is one question without an answer
                reply = Fault(f"{type(error).__name__}: {error}")
            _send(pipe, next(numbers), reply)


def _send(pipe: mpc.Connection, number: int, reply: Any) -> None:
    try:
        message = pickle.dumps((number, reply))
    except Exception as error:
        message = pickle.dumps((number, Fault(f"its answer cannot be sent: {type(error).__name__}: {error}")))
    pipe.send_bytes(message)


async def _many(pipe: mpc.Connection, answer: Callable[[Any], Any], questions: Sequence[Any], numbers: Iterator[int]) -> None:
    async def guarded(question: Any) -> Any:
        try:
            return await answer(question)
        except Exception as error:
            return Fault(f"{type(error).__name__}: {error}")

    async for reply in at_once.in_order(guarded, questions, at_once.in_flight(answer)):
        _send(pipe, next(numbers), reply)


if __name__ == "__main__":
    from ptf.rl import child  # the classes that are sent must be the package's, not __main__'s

    child.serve(mpc.Connection(int(sys.argv[1])))
