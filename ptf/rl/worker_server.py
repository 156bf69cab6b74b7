"""The program of a worker process (ptf.rl.worker_process): it answers numbered questions from a pipe, many at once.

A coroutine function runs in the process's event loop. A plain function runs in a thread, an environment in one of its
own for all of its calls; a reward whose attribute `max_concurrent_calls` is 1 runs in the main thread, one call after
the other.
Threads help only calls that wait, so no call begins in a thread while two others compute.

A thread cannot be ended. If its call takes too long, it is left alone, and the process ends as soon as nothing else is
in it; the parent then starts another.

Messages of the parent: (number, question). Messages to it: (READY, 0, whether the process ends calls that take
too long), (STARTED, number, None), (REPLY, number, reply), and (LEFT, 0, None) before it ends by itself.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import multiprocessing.connection as mpc
import os
import pickle
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ptf.config import Plugin, plugin
from ptf.config.plugin_checks import environment_fault
from ptf.config.reward_signature import RewardSignature
from ptf.errors import UserError
from ptf.rl.rewards import declarations as overlapping
from ptf.rl.rewards.calls import Response, call_arguments, checked_rewards
from ptf.rl.worker_messages import LEFT, READY, REPLY, STARTED, Fault, Interrupted

COMPUTING = 2  # calls that compute: a further call in a thread would only make them slower
SHARE = 0.2  # of its time in which a thread used a processor: above it, its call computes
LOOK_S = 0.005  # the time over which the use of the processor is measured
SWITCH_S = 2e-4  # after which a call that computes leaves the interpreter to another, instead of 5e-3
IDLE_S = 0.1  # how often a process with a thread that never came back looks whether it may end


class TooLong(Exception):
    """A call took longer than its limit."""


class Pipe:
    """The process's end of the pipe; any thread may send."""

    def __init__(self, connection: mpc.Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def send(self, kind: str, number: int, value: Any = None) -> None:
        """Send a message; of a reply that cannot be pickled, the reason."""
        try:
            message = pickle.dumps((kind, number, value))
        except Exception as error:
            said = f"its reply cannot be sent: {type(error).__name__}: {error}"
            message = pickle.dumps((kind, number, Fault(said)))
        with self.lock:
            self.connection.send_bytes(message)


def fault_of(error: BaseException) -> Fault:
    """Return an error of the users' code as a fault."""
    hint = ""
    if "main thread of the main interpreter" in str(error):
        hint = (
            "; it runs in a thread: give the function the attribute `max_concurrent_calls = 1`, and it runs in the "
            "main thread"
        )
    return Fault(f"{type(error).__name__}: {error}{hint}")


class Threads:
    """Plain functions in threads. Up to `most` calls run at once if they wait; if two of them compute, the next one
    begins when another ends."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self.most, self.timeout_s = most, timeout_s
        self.running = 0
        self.coroutines = 0  # calls in the event loop
        self.computing = 0  # calls that computed when it was last measured, those that are stuck too
        self.room = 1  # how many calls may begin until the processor's use is measured again
        self.stuck = 0  # calls that took too long, whose threads are left alone
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.looked = time.monotonic()
        self.clocks = dict[int, float]()  # of the threads with a call: the processor time that was last seen
        self.timer: asyncio.TimerHandle | None = None

    async def result(self, thread: concurrent.futures.Executor, started: Callable[[], None], function: Callable) -> Any:
        """Return the result of a function, of a coroutine function in the event loop, otherwise in the thread;
        `started` is called when its turn comes. Raises TooLong."""
        if overlapping.is_asynchronous(function):
            started()
            self.coroutines += 1
            try:
                task = asyncio.ensure_future(function())
                # unlike wait_for, not for a coroutine that refuses to end; and a TimeoutError is the coroutine's own
                done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
                if done:
                    return task.result()
                task.cancel()
                raise TooLong
            finally:
                self.coroutines -= 1
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self._admit()
        await turn
        try:
            started()
            result = asyncio.get_running_loop().run_in_executor(thread, functools.partial(self._run, function))
            done, _ = await asyncio.wait({result}, timeout=self.timeout_s)
        finally:
            self.running -= 1
            self._admit()
        if done:
            outcome = result.result()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        self.stuck += 1
        result.add_done_callback(self._came_back)
        raise TooLong

    def _run(self, function: Callable) -> Any:
        clock = time.pthread_getcpuclockid(threading.get_ident()) if sys.platform == "linux" else 0
        if clock:
            self.clocks[clock] = time.clock_gettime(clock)
        try:
            return function()
        except BaseException as error:  # a future does not take StopIteration, and SystemExit would end the loop
            is_taken = isinstance(error, Exception) and not isinstance(error, StopIteration)
            return error if is_taken else RuntimeError(f"{type(error).__name__}: {error}")
        finally:
            self.clocks.pop(clock, None)

    def _computing(self, seconds: float) -> int:
        """Return how many calls used more than `SHARE` of a processor in the last `seconds`."""
        computing = 0
        for clock, before in list(self.clocks.items()):
            with contextlib.suppress(OSError, KeyError):  # the thread may end meanwhile
                now = time.clock_gettime(clock)
                computing += now - before > SHARE * seconds
                if clock in self.clocks:
                    self.clocks[clock] = now
        return computing

    def _came_back(self, result: asyncio.Future) -> None:
        self.stuck -= 1

    def _admit(self) -> None:
        now = time.monotonic()
        if (passed := now - self.looked) >= LOOK_S:
            self.computing = self._computing(passed)
            self.looked, self.room = now, max(1, self.running) if self.computing < COMPUTING else 0
        most = 0 if self.is_full else self.most  # the process ends first
        while self.waiting and self.running < most and (not self.running or self.room > 0):
            self.waiting.popleft().set_result(None)
            self.running += 1
            self.room -= 1
        if self.waiting and self.running < self.most and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    @property
    def is_full(self) -> bool:
        """Whether no call begins until the process is replaced: one of the threads that never came back computes, or
        there are too many of them."""
        return 2 * self.stuck >= self.most or bool(self.stuck and self.computing and not self.running)

    def look(self) -> None:
        """Measure the processor's use, and begin the calls that there is room for."""
        self.timer = None
        self._admit()


class RewardCalls:
    """Answers questions: each has the responses that one call scores, the reply a number or a Fault for each, or one
    Fault."""

    environments: Mapping[int, Any] = {}  # nothing is kept between two questions

    def __init__(self, what: Plugin, timeout_s: float) -> None:
        self.signature = RewardSignature.of(plugin.resolve(what.use), what.args)
        self.function = overlapping.reward_of(what)
        overlapping.first_lines(what)  # its checks of this machine run now, because the first call has a time limit
        is_plain = not overlapping.is_asynchronous(self.function)
        most = overlapping.max_concurrent_calls(self.function)
        self.one_by_one = most == 1 and is_plain
        self.limit, self.threads = asyncio.Semaphore(most), Threads(most, timeout_s)
        self.pool = concurrent.futures.ThreadPoolExecutor(most)
        if is_plain and most > 1:  # threads are begun now, and not while another call computes
            all_begun = threading.Event()
            for _ in range(min(most, overlapping.THREADS)):
                self.pool.submit(all_begun.wait)
            all_begun.set()

    def answer(self, question: Sequence[Response]) -> list[float | Fault] | Fault:
        """Answer in this thread."""
        positional, keywords = call_arguments(self.signature, question)
        return checked_rewards(self.signature, self.function(*positional, **keywords), len(question))

    async def answer_concurrently(self, question: Sequence[Response], started: Callable[[], None]) -> Any:
        """Answer while others are answered."""
        positional, keywords = call_arguments(self.signature, question)
        function = functools.partial(self.function, *positional, **keywords)
        async with self.limit:
            value = await self.threads.result(self.pool, started, function)
        return checked_rewards(self.signature, value, len(question))


class EnvironmentCalls:
    """Answers ("reset", episode, row, seed), ("step", episode, text) and ("end", episode)."""

    one_by_one = False

    def __init__(self, what: Plugin, timeout_s: float) -> None:
        self.what, self.make, self.timeout_s = what, plugin.bind(what), timeout_s
        most = overlapping.max_concurrent_calls(plugin.resolve(what.use), overlapping.THREADS)
        self.threads = Threads(most, timeout_s)
        self.environments = dict[int, Any]()
        self.pools = dict[int, concurrent.futures.ThreadPoolExecutor]()
        self.closings = set[asyncio.Task]()

    async def answer_concurrently(self, question: Any, started: Callable[[], None]) -> Any:
        """Answer while others are answered."""
        verb, episode, *rest = question
        if verb == "end":
            started()
            self._forget(episode)
            return None
        if verb == "reset":
            row, seed = rest
            self._forget(episode)
            pool = self.pools[episode] = concurrent.futures.ThreadPoolExecutor(1)
            try:
                environment = await self.threads.result(pool, started, functools.partial(self._made, row, seed))
                if self.pools.get(episode) is pool:
                    self.environments[episode] = environment
                messages = await self.threads.result(pool, started, environment.reset)
            except BaseException:
                if self.pools.get(episode) is pool:
                    self._forget(episode)
                raise
            return list(messages), getattr(environment, "tools", None)
        if (environment := self.environments.get(episode)) is None:
            return Interrupted()  # its process ended between two questions
        return await self.threads.result(self.pools[episode], started, functools.partial(environment.step, *rest))

    def _made(self, row: Mapping[str, Any], seed: int) -> Any:
        environment = self.make(row, seed)
        if fault := environment_fault(environment):
            raise UserError(f"{self.what.use} {fault}")
        return environment

    def _forget(self, episode: int) -> None:
        """Discard an episode's environment, and close it if it has a `close`. Its thread ends with the call that it is
        in."""
        environment, pool = self.environments.pop(episode, None), self.pools.pop(episode, None)
        if pool is not None and (close := getattr(environment, "close", None)) is not None:
            task = asyncio.create_task(self._close(pool, close))
            self.closings.add(task)
            task.add_done_callback(self.closings.discard)
        elif pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _close(self, pool: concurrent.futures.Executor, close: Callable[[], Any]) -> None:
        """Call an environment's `close`; a failure is printed, because the episode does not need it."""
        try:
            await self.threads.result(pool, lambda: None, close)
        except TooLong:
            print(f"`close` of the environment {self.what.use} took longer than {self.timeout_s:g} s", flush=True)
        except Exception as error:
            print(f"`close` of the environment {self.what.use} failed: {fault_of(error).reason}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


async def serve_concurrently(pipe: Pipe, calls: RewardCalls | EnvironmentCalls, read: Callable[..., None]) -> None:
    """Answer in the event loop and in threads."""
    loop, threads, tasks, began = asyncio.get_running_loop(), calls.threads, set[asyncio.Task](), set[int]()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(overlapping.THREADS))

    async def one(number: int, question: Any) -> None:
        began.add(number)
        try:
            reply = await calls.answer_concurrently(question, functools.partial(pipe.send, STARTED, number))
        except TooLong:
            is_crowded = len(began) > 1 or threads.stuck > 1
            reply = Fault(f"took longer than {threads.timeout_s:g} s", crowded=is_crowded)
        except (Exception, asyncio.CancelledError) as error:  # of the users' code: it affects only this question
            reply = fault_of(error)
        began.discard(number)
        pipe.send(REPLY, number, reply)

    def begin(number: int, question: Any) -> None:
        task = loop.create_task(one(number, question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    threading.Thread(target=read, args=(functools.partial(loop.call_soon_threadsafe, begin),), daemon=True).start()
    idle = 0
    while idle < 2:  # otherwise the process ends when the pipe closes
        await asyncio.sleep(IDLE_S)
        threads.look()
        # a thread never came back, and nothing else is in the process, or could begin in it
        is_left = threads.stuck and not threads.running and not threads.coroutines
        idle = idle + 1 if is_left and (threads.is_full or not (tasks or calls.environments)) else 0
    pipe.send(LEFT, 0)
    os._exit(0)


def serve(connection: mpc.Connection) -> None:
    """Answer questions until the pipe closes.

    The process also ends with its parent (ptf.workspace.entry), even while the users' code hangs.
    """
    kind, what, timeout_s = connection.recv()
    pipe = Pipe(connection)
    calls = {"reward": RewardCalls, "environment": EnvironmentCalls}[kind](Plugin(**what), timeout_s)
    questions: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def read(take: Callable[[int, Any], object]) -> None:
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            number, question = pickle.loads(message)  # the question is pickled by itself, for it may not be readable
            try:
                question = pickle.loads(question)
            except Exception as error:
                pipe.send(STARTED, number)
                pipe.send(REPLY, number, Fault(f"the question cannot be read: {type(error).__name__}: {error}"))
                continue
            take(number, question)

    pipe.send(READY, 0, not calls.one_by_one)
    if isinstance(calls, RewardCalls) and calls.one_by_one:
        threading.Thread(target=read, args=(lambda *message: questions.put(message),), daemon=True).start()
        while True:
            number, question = questions.get()
            pipe.send(STARTED, number)
            try:
                reply = calls.answer(question)
            except Exception as error:  # an error of the users' code affects only this question
                reply = fault_of(error)
            pipe.send(REPLY, number, reply)
    else:
        sys.setswitchinterval(SWITCH_S)
        asyncio.run(serve_concurrently(pipe, calls, read))


if __name__ == "__main__":
    serve(mpc.Connection(int(sys.argv[1])))
