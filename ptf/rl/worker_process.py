"""A process for users' code: rewards and environments. If the code raises, hangs, stops or dies, the caller gets a
`Fault` with the reason.

Every reply has a deadline and the number of its question. A process that misses the deadline, or whose reply cannot be
read or has a wrong number, is killed with all processes that it has started; the next question starts a new process.
The process ends with the thread that started it, so that thread must live as long as the process is used. Run as a
program (by ptf.entry), this module is the process: it answers pickled questions from a pipe until the pipe closes.
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
from ptf.config import Plugin, plugin
from ptf.config.plugin_checks import environment_fault
from ptf.data.trajectory import MAX_REWARD, is_reward
from ptf.errors import UserError
from ptf.rl.rewards import concurrent

STARTS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a question has no reply."""

    reason: str
    fatal: bool = False  # True: the process has ended, and its state is lost


class Deadline:
    """Calls `act` from a separate thread if a block under `set` takes longer than `after_s` seconds."""

    def __init__(self, after_s: float, act: Callable[[], None]) -> None:
        self.after_s, self.act = after_s, act
        self.at = math.inf
        self.passed = False
        self.closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # the wait is never longer than `after_s`, so it ends before any deadline that is set meanwhile
        while not self.closed.wait(max(0.0, min(self.at - time.monotonic(), self.after_s))):
            if time.monotonic() >= self.at:
                self.passed = True
                self.act()
                return

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Run a block that must end in `after_s` seconds."""
        self.at = time.monotonic() + self.after_s
        try:
            yield
        finally:
            self.at = math.inf

    def close(self) -> None:
        """End the thread."""
        self.closed.set()


class WorkerProcess:
    """One process that serves a plugin as `kind`: "reward" or "environment". It starts with the first question."""

    def __init__(self, kind: str, what: Plugin, timeout_s: float) -> None:
        plugin.bind(what)  # raises here, in this process, if the name cannot be resolved
        self.kind, self.what, self.timeout_s = kind, what, timeout_s
        self.question_count = 0  # questions that were sent to the current process
        self.process: subprocess.Popen | None = None
        self.pipe: mpc.Connection | None = None

    def _start(self) -> mpc.Connection:
        ours, theirs = mpc.Pipe()
        with theirs:
            number = theirs.fileno()
            environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
            self.process = start(
                "ptf.rl.worker_process", [str(number)], environment, pass_fds=[number], start_new_session=True
            )
        self.pipe, self.question_count = ours, 0
        try:
            ours.send((self.kind, self.what.model_dump()))
            ready = ours.poll(STARTS_WITHIN_S) and ours.recv() == "ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise UserError(
                f"the process for the {self.kind} {self.what.use} died or did not start in {STARTS_WITHIN_S:g} s; "
                "see its output above"
            )
        return ours

    def replies(self, questions: Sequence[Any]) -> Iterator[Any]:
        """Yield the reply to each question, in order; a fatal Fault is the last reply.

        All questions are sent at once, so the process never waits for the next one.
        """
        # A process that died before it read anything is replaced, and the new one gets the same questions. A process of
        # environments is not replaced, because the questions refer to its state.
        for is_last_attempt in (self.pipe is None or self.kind == "environment", True):
            pipe, answered, doing = self.pipe or self._start(), 0, "did not listen for"
            first = self.question_count
            self.question_count += len(questions)
            deadline = Deadline(self.timeout_s, self._kill)  # killing the process ends the calls that wait for it
            try:
                with deadline.set():
                    pipe.send(list(questions))
                doing = "took longer than"
                while answered < len(questions):
                    if not pipe.poll(self.timeout_s):
                        yield self._fatal(f"{doing} {self.timeout_s:g} s")
                        return
                    with deadline.set():  # the process may stop in the middle of a reply
                        number, reply = pipe.recv()
                    if number != first + answered:
                        yield self._fatal(f"answered question {number} instead of {first + answered} (does it fork?)")
                        return
                    answered += 1
                    yield reply
                return
            except (EOFError, OSError):
                self.close()
                if is_last_attempt or answered or deadline.passed:
                    yield self._fatal(
                        f"{doing} {self.timeout_s:g} s" if deadline.passed else f"the {self.kind}'s process died"
                    )
                    return
            except Exception as error:  # unpickling may raise anything
                yield self._fatal(f"its reply cannot be read: {type(error).__name__}: {error}")
                return
            finally:
                deadline.close()

    def _fatal(self, reason: str) -> Fault:
        self.close()
        return Fault(reason, fatal=True)

    def ask(self, question: Any) -> Any:
        """Return the reply to one question, or a Fault."""
        return next(self.replies([question]))

    def _kill(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # also kills the processes that it has started

    def close(self) -> None:
        """End the process, if there is one; the next question starts a new one."""
        if self.pipe:
            self.pipe.close()
        if self.process:
            self._kill()
            self.process.wait(10)
        self.pipe = self.process = None


def reward_of(what: Plugin) -> Callable[[Any], Any]:
    """Return a function that maps a question, (row, text), to the reward, a number, or to a Fault.

    It is a coroutine function if the reward is one.
    """
    function = concurrent.asynchronous(what)
    # the reward's checks of this machine run now, because the first question has a deadline
    concurrent.first_lines(what)

    def checked(value: Any) -> float | Fault:
        if isinstance(value, str | bytes | bytearray):  # float() would accept some of them
            return Fault(f"the reward is {str(value)[:60]!r}, a text and not a number")
        value = float(value)
        if not is_reward(value):
            return Fault(f"the reward is {value}, not a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
        return value

    async def answer_later(question: tuple[Mapping[str, Any], str]) -> float | Fault:
        return checked(await function(*question))

    def answer(question: tuple[Mapping[str, Any], str]) -> float | Fault:
        return checked(function(*question))

    answer_later.in_flight = concurrent.in_flight(function)  # type: ignore[attr-defined]
    return answer_later if concurrent.is_asynchronous(function) else answer


def environment_of(what: Plugin) -> Callable[[Any], Any]:
    """Return a function that answers questions to environments.

    Questions are ("reset", episode, row, seed), ("step", episode, text) and ("end", episode).
    """
    make, environments = plugin.bind(what), dict[int, Any]()

    def answer(question: tuple) -> Any:
        verb, episode, *rest = question
        if verb == "reset":
            row, seed = rest
            environment = make(row, seed)
            if fault := environment_fault(environment):
                raise UserError(f"{what.use} {fault}")
            messages = list(environment.reset())
            environments[episode] = environment
            return messages, getattr(environment, "tools", None)
        if verb == "step":
            return environments[episode].step(*rest)
        environments.pop(episode, None)
        return None

    return answer


def serve(pipe: mpc.Connection) -> None:
    """Answer questions until the pipe closes.

    The process also ends with its parent (ptf.entry), even while the users' code hangs.
    """
    kind, what = pipe.recv()
    answer = {"reward": reward_of, "environment": environment_of}[kind](Plugin(**what))
    pipe.send("ready")
    count = 0
    while True:
        try:
            questions = pipe.recv()
        except EOFError:
            return
        numbers = itertools.count(count)
        count += len(questions)
        if concurrent.is_asynchronous(answer):
            asyncio.run(_answer_concurrently(pipe, answer, questions, numbers))
            continue
        for question in questions:
            try:
                reply = answer(question)
            except Exception as error:  # an error of the users' code affects only this question
                reply = Fault(f"{type(error).__name__}: {error}")
            _send(pipe, next(numbers), reply)


def _send(pipe: mpc.Connection, number: int, reply: Any) -> None:
    try:
        message = pickle.dumps((number, reply))
    except Exception as error:
        message = pickle.dumps((number, Fault(f"its reply cannot be sent: {type(error).__name__}: {error}")))
    pipe.send_bytes(message)


async def _answer_concurrently(
    pipe: mpc.Connection, answer: Callable[[Any], Any], questions: Sequence[Any], numbers: Iterator[int]
) -> None:
    async def guarded(question: Any) -> Any:
        try:
            return await answer(question)
        except Exception as error:
            return Fault(f"{type(error).__name__}: {error}")

    async for reply in concurrent.in_order(guarded, questions, concurrent.in_flight(answer)):
        _send(pipe, next(numbers), reply)


if __name__ == "__main__":
    from ptf.rl import worker_process

    worker_process.serve(mpc.Connection(int(sys.argv[1])))
