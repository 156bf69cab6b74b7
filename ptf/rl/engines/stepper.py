"""A thread that steps an engine while it has requests, and the coroutines that wait for its responses.

Between two steps, and only there, requests are added or aborted. The event loop is never blocked: it takes new requests
while the engine computes, and gets tokens as they are sampled. The thread ends when no request is left, so that an
engine without requests is used by its callers alone (to load weights, or to sleep).
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ptf.data.trajectory import Generation
from ptf.rl.engines.protocol import Progress, Request

ENDS_WITHIN_S = 60.0  # a step that still runs when all its requests were aborted


class SteppingEngine(Protocol):
    """An engine that computes one step at a time. All methods are called from one thread."""

    def add(self, requests: Sequence[Request], streamed: bool) -> list[int]:
        """Accept requests, and return a number for each. Raises ValueError for requests that cannot be served.

        Tokens of requests that are not `streamed` need not be reported before their responses end.
        """
        ...

    def step(self) -> list[Progress]:
        """Sample further tokens of the requests; return what is new."""
        ...

    def abort(self, numbers: Sequence[int]) -> None:
        """Drop requests whose responses nobody waits for."""
        ...


@dataclass(eq=False)
class Submission:
    """Requests that were submitted together, and the function that gets what their responses become."""

    requests: Sequence[Request]
    streamed: bool
    loop: asyncio.AbstractEventLoop  # in which `receive` is called
    receive: Callable[[int, "Progress | BaseException"], None]  # number of the request in `requests`
    numbers: list[int] = field(default_factory=list)  # the engine's
    aborted: bool = False


Item = tuple[Submission, int, Progress | BaseException]  # what is new of which of its requests


def hand_over(items: Sequence[Item]) -> None:
    """Let each event loop receive what is new of its submissions, all at once: it is woken once for a step."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Item]] = {}
    for item in items:
        by_loop.setdefault(item[0].loop, []).append(item)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_receive, mine)


def _receive(items: Sequence[Item]) -> None:
    for submission, place, news in items:
        submission.receive(place, news)


class Stepper:
    """Steps an engine in a thread of its own."""

    def __init__(self, engine: SteppingEngine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        self.inbox: deque[Submission] = deque()
        self.aborted: deque[Submission] = deque()
        self.running: dict[int, tuple[Submission, int]] = {}  # the engine's number → submission, place in it
        self.thread: threading.Thread | None = None
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def generate_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the responses to requests that are submitted together. Raises what the engine raises."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Generation]] = [loop.create_future() for _ in requests]

        def resolve(place: int, news: Progress | BaseException) -> None:
            future = futures[place]
            if future.done():
                return
            if isinstance(news, BaseException):
                future.set_exception(news)
            elif news.generation is not None:
                future.set_result(news.generation)

        submission = self._submit(Submission(requests, False, loop, resolve))
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            return [future.result() for future in [f for f in futures if f.done() and f.exception()] or futures]
        finally:
            self._abort(submission)

    async def generate(self, request: Request) -> Generation:
        """Return the response to one request."""
        return (await self.generate_all([request]))[0]

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """Yield the tokens of a response as they are sampled; the last item has the whole generation.

        Closing the generator aborts the request.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | BaseException] = asyncio.Queue()

        submission = self._submit(Submission([request], True, loop, lambda _, item: news.put_nowait(item)))
        try:
            while True:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.generation is not None:
                    return
        finally:
            self._abort(submission)

    @contextlib.contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Use the engine from the caller's thread. Raises RuntimeError while requests are being served."""
        with self.changed:
            if self.waiting_requests:
                raise RuntimeError(f"the engine cannot {what} while {self.waiting_requests} requests are being served")
            if not self.changed.wait_for(lambda: self.thread is None, ENDS_WITHIN_S):
                raise RuntimeError(f"the engine cannot {what}: a step did not end within {ENDS_WITHIN_S:g} s")
            yield

    @property
    def waiting_requests(self) -> int:
        """Return the number of requests that somebody waits for."""
        waiting = sum(len(submission.requests) for submission in self.inbox if not submission.aborted)
        return waiting + sum(not submission.aborted for submission, _ in self.running.values())

    def _submit(self, submission: Submission) -> Submission:
        with self.changed:
            self.inbox.append(submission)
        # not at once: requests of other coroutines that are submitted now begin with the same step
        asyncio.get_running_loop().call_soon(self._start)
        return submission

    def _start(self) -> None:
        with self.changed:
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self.thread.start()

    def _abort(self, submission: Submission) -> None:
        with self.changed:
            submission.aborted = True
            if any(of is submission for of, _ in self.running.values()):
                self.aborted.append(submission)

    def _run(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
        while True:
            with self.changed:
                submissions, self.inbox = self.inbox, deque()
                aborted, self.aborted = self.aborted, deque()
                if not submissions and not self.running:
                    self.thread = None
                    self.changed.notify_all()
                    return
            try:
                self._drop(aborted)
                for submission in submissions:
                    self._admit(submission)
                if self.running:
                    self._deliver([(progress.number, progress) for progress in self.engine.step()])
            except BaseException as error:  # whatever it is: callers would wait for ever
                self._fail(error, submissions)

    def _admit(self, submission: Submission) -> None:
        if submission.aborted:
            return
        try:
            submission.numbers = self.engine.add(submission.requests, submission.streamed)
        except ValueError as error:
            if type(error) is not ValueError:  # a subclass is a fault inside the engine
                raise
            hand_over([(submission, place, error) for place in range(len(submission.requests))])
            return
        with self.changed:
            self.running |= {number: (submission, place) for place, number in enumerate(submission.numbers)}

    def _deliver(self, news: Sequence[tuple[int, Progress | BaseException]]) -> None:
        """Give the callers what is new; a request whose response is whole, or that failed, is served no longer."""
        items = list[Item]()
        try:
            with self.changed:
                for number, item in news:
                    if isinstance(item, Progress) and item.error is not None:
                        item = item.error
                    items.append((*self.running[number], item))
                    if isinstance(item, BaseException) or item.generation is not None:
                        del self.running[number]
        finally:  # also what came before an answer to no request
            hand_over(items)

    def _drop(self, aborted: Sequence[Submission]) -> None:
        """Abort what is left of the submissions that nobody waits for."""
        numbers = [number for of in aborted for number in of.numbers if number in self.running]
        if numbers:
            self.engine.abort(numbers)
        with self.changed:
            for number in numbers:
                del self.running[number]

    def _fail(self, error: BaseException, submissions: Sequence[Submission]) -> None:
        """Give all callers the error of a step. A ValueError is wrapped, since it means that a request is refused."""
        cause = error
        if isinstance(error, ValueError):
            error = RuntimeError(f"the engine failed while generating: {error!r}")
            error.__cause__ = cause
        numbers = list(self.running)
        with contextlib.suppress(Exception):  # the engine has failed already
            self.engine.abort(numbers)
        self._deliver([(number, error) for number in numbers])
        for submission in submissions:
            if not submission.numbers and not submission.aborted:
                hand_over([(submission, place, error) for place in range(len(submission.requests))])
