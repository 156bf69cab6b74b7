"""A thread that steps an engine while it has requests, and the coroutines that wait for its responses.

Between two steps, and only there, requests are added or aborted. The event loop is never blocked: it takes new requests
while the engine computes, and gets tokens as they are sampled. The thread ends when no request is left, so that an
engine without requests is used by its callers alone (to load weights, or to sleep).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from ptf.data.trajectory import Generation
from ptf.rl.engines.protocol import NOTHING, Progress, Request

ENDS_WITHIN_S = 60.0  # a step that still runs when all its requests were aborted


class SteppingEngine(Protocol):
    """An engine that computes one step at a time. All methods are called from one thread."""

    def add(self, requests: Sequence[Request], streamed: Sequence[bool]) -> list[int]:
        """Accept requests that arrived together, and return a number for each.

        One that cannot be served is reported by a step, with a ValueError. Tokens of requests that are not `streamed`
        need not be reported before their responses end.
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
    """A request, and the function that gets what its response becomes."""

    request: Request
    streamed: bool
    loop: asyncio.AbstractEventLoop  # in which `receive` is called
    receive: Callable[[Progress], None]
    aborted: bool = False


Item = tuple[Submission, Progress]  # what is new of which


def receive(items: Sequence[Item]) -> None:
    """Let each submission receive what is new of it."""
    for submission, news in items:
        submission.receive(news)


def hand_over(items: Sequence[Item]) -> None:
    """Have each event loop call `receive` with what is new of its submissions: it is woken once for a step."""
    for loop in {submission.loop for submission, _ in items}:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(receive, [item for item in items if item[0].loop is loop])


class Stepper:
    """Steps an engine in a thread of its own."""

    def __init__(self, engine: SteppingEngine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        self.arriving: list[Submission] = []  # until the event loop runs `_start`
        self.inbox: list[list[Submission]] = []  # those that arrived together
        self.running: dict[int, Submission] = {}  # by the engine's number
        self.thread: threading.Thread | None = None
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def generate(self, request: Request) -> Generation:
        """Return the response to one request. Raises what the engine raises."""
        *_, whole = [cast("Generation", news.generation) async for news in self.stream(request, streamed=False)]
        return whole

    async def stream(self, request: Request, streamed: bool = True) -> AsyncGenerator[Progress]:
        """Yield the tokens of a response as they are sampled, or without `streamed` as the engine reports them; the
        last item has the whole generation.

        Closing the generator aborts the request.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Progress]()
        submission = Submission(request, streamed, loop, news.put_nowait)
        with self.changed:
            self.arriving.append(submission)
        # not at once: requests of other coroutines that are submitted now begin with the same step
        loop.call_soon(self._start)
        try:
            while True:
                item = await news.get()
                if item.error is not None:
                    raise item.error
                yield item
                if item.generation is not None:
                    return
        finally:
            submission.aborted = True

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
        groups = [self.arriving, *self.inbox, self.running.values()]
        return sum(not submission.aborted for group in groups for submission in group)

    def _start(self) -> None:
        with self.changed:
            if self.arriving:
                self.inbox.append(self.arriving)
                self.arriving = []
            if self.inbox and self.thread is None:
                self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
        while True:
            with self.changed:
                groups, self.inbox = self.inbox, []
                if not groups and not self.running:
                    self.thread = None
                    self.changed.notify_all()
                    return
            try:
                if numbers := [number for number, one in self.running.items() if one.aborted]:
                    self.engine.abort(numbers)
                    with self.changed:
                        for number in numbers:
                            del self.running[number]
                for group in groups:
                    self._admit(group)
                if self.running:
                    self._deliver(self.engine.step())
            except BaseException as error:  # whatever it is: callers would wait for ever
                self._fail(error, [submission for group in groups for submission in group])

    def _admit(self, group: Sequence[Submission]) -> None:
        wanted = [submission for submission in group if not submission.aborted]
        if not wanted:
            return
        numbers = self.engine.add([one.request for one in wanted], [one.streamed for one in wanted])
        with self.changed:
            self.running |= dict(zip(numbers, wanted, strict=True))

    def _deliver(self, news: Sequence[Progress]) -> None:
        """Give the callers what is new; a request whose response is whole, or that failed, is served no longer."""
        items = list[Item]()
        try:
            with self.changed:
                for item in news:
                    items.append((self.running[item.number], item))
                    if item.error is not None or item.generation is not None:
                        del self.running[item.number]
        finally:  # also what came before an answer to no request
            hand_over(items)

    def _fail(self, error: BaseException, submissions: Sequence[Submission]) -> None:
        """Give all callers the error of a step. A ValueError is wrapped, since it means that a request is refused."""
        cause = error
        if isinstance(error, ValueError):
            error = RuntimeError(f"the engine failed while generating: {error!r}")
            error.__cause__ = cause
        news = [Progress(number, *NOTHING, error=error) for number in self.running]
        waiting = [one for one in submissions if not one.aborted and one not in self.running.values()]
        with contextlib.suppress(Exception):  # the engine has failed already
            self.engine.abort([*self.running])
        self._deliver(news)
        hand_over([(one, Progress(-1, *NOTHING, error=error)) for one in waiting])
