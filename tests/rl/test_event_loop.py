"""ptf.rl.event_loop: the same where no loop runs and, as in a notebook, where one does."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import pytest

from ptf.rl.event_loop import EventLoop, run_coroutine

T = TypeVar("T")


def plainly(call: Callable[[], T]) -> T:
    return call()


def in_notebook(call: Callable[[], T]) -> T:
    """Call as a cell of a notebook does: in the thread of a running loop."""

    async def cell() -> T:
        return call()

    with asyncio.Runner() as runner:  # whose `run` would keep an interrupt to itself
        return runner.get_loop().run_until_complete(cell())


WHERE = pytest.mark.parametrize("where", [plainly, in_notebook])


@WHERE
def test_a_coroutine_is_run(where: Callable) -> None:
    async def doubled(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert where(lambda: run_coroutine(doubled(21))) == 42


def test_without_a_running_loop_coroutines_are_in_the_callers_thread() -> None:
    """Users' code may need the main thread, and a process that an agent's is replaced by lasts as long as the thread
    that started it."""

    async def where() -> int:
        return threading.get_ident()

    with closing(EventLoop()) as loop:
        assert loop.run(where()) == run_coroutine(where()) == threading.get_ident()
    with closing(EventLoop(own_thread=True)) as loop:
        assert loop.run(where()) != threading.get_ident()


@WHERE
def test_what_a_coroutine_raises_is_raised(where: Callable) -> None:
    async def failing() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        where(lambda: run_coroutine(failing()))


@WHERE
def test_tasks_wait_between_runs_and_are_cancelled_at_the_end(where: Callable) -> None:
    said = list[str]()

    async def patient() -> None:
        try:
            await asyncio.sleep(0.01)
            said.append("went on")
            await asyncio.sleep(3600)
        finally:
            said.append("cancelled")

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(patient())

    def cell() -> None:
        threads = threading.active_count()
        with closing(EventLoop()) as loop:
            task = loop.run(begin())
            time.sleep(0.05)
            assert said == []  # nothing runs between two calls
            loop.run(asyncio.sleep(0.05))
            assert said == ["went on"]
            assert not task.done()
        assert said == ["went on", "cancelled"]
        assert task.cancelled()
        assert threading.active_count() == threads

    where(cell)


@pytest.fixture
def interrupted() -> Iterator[None]:
    """As in a terminal: a process in the background may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@WHERE
@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_cancels_what_runs(where: Callable) -> None:
    said = list[str]()

    async def patient() -> None:
        main = threading.main_thread().ident
        assert main
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            said.append("cancelled")

    def cell() -> float:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(patient())
        return time.monotonic() - began

    assert where(cell) < 30
    assert said == ["cancelled"]


def test_asyncio_run_alone_would_be_refused_in_a_notebook() -> None:
    async def nothing() -> None: ...

    running = nothing()
    with pytest.raises(RuntimeError, match="running event loop"):
        in_notebook(lambda: asyncio.run(running))
    running.close()
