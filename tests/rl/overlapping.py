"""Rewards and environments whose calls overlap in one process, for tests."""

import asyncio
import os
import signal
import threading
import time

from ptf.rl.environments.protocol import StepResult

TOGETHER = threading.Barrier(32)


def together(row, text):
    """Return when 32 calls are in the process at once."""
    TOGETHER.wait(30)
    return 1.0


async def waits(row, text):
    """Take a moment."""
    await asyncio.sleep(0.05)
    return 1.0


def noted(row, text):
    """Note the call in a file; hang, end the process, or take a moment, as the text says."""
    with open(row["calls"], "a") as stream:
        stream.write(f"{text}\n")
    if text == "hang":
        time.sleep(600)
    if text == "die":
        time.sleep(0.3)  # while the others are in flight
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.6)
    return float(os.getpid())


def with_alarm(row, text):
    """Need the main thread, as rewards with an alarm do."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


def waits_then_computes(row, text):
    """Wait until all have begun, then compute for a while, which 24 at once cannot do in their time."""
    time.sleep(0.2)
    until = time.thread_time() + 0.15
    while time.thread_time() < until:
        pass
    return 1.0


def stops(row, text):
    """Raise what a future does not take."""
    return next(iter([]))


class Together:
    """Each step returns when 32 episodes are in theirs; all methods of an episode run in one thread."""

    def __init__(self, row, seed):
        self.thread = threading.get_ident()

    def reset(self):
        assert threading.get_ident() == self.thread
        return [{"role": "user", "content": "1"}]

    def step(self, text):
        assert threading.get_ident() == self.thread
        TOGETHER.wait(30)
        return StepResult(reward=1.0, done=True)


class TogetherAsync:
    """The same with coroutine functions, which all run in the event loop."""

    inside = 0
    all_inside: asyncio.Event | None = None

    def __init__(self, row, seed):
        self.row = row

    async def reset(self):
        return [{"role": "user", "content": "1"}]

    async def step(self, text):
        if self.row.get("fault") == "hang":
            await asyncio.sleep(600)
        if self.row.get("fault") == "block":
            time.sleep(600)
        cls = type(self)
        cls.all_inside = cls.all_inside or asyncio.Event()
        cls.inside += 1
        if cls.inside == self.row.get("parties", 32):
            cls.all_inside.set()
        await asyncio.wait_for(cls.all_inside.wait(), 30)
        return StepResult(reward=1.0, done=True)


class Counting:
    """Pays the number of the turn."""

    def __init__(self, row, seed):
        self.turn = 0

    def reset(self):
        return [{"role": "user", "content": "1"}]

    def step(self, text):
        self.turn += 1
        return StepResult([{"role": "user", "content": "1"}], reward=float(self.turn))


class Closes:
    """An environment that notes in a file when it was closed; the row says what goes wrong."""

    def __init__(self, row, seed):
        self.row = row

    def reset(self):
        return [{"role": "user", "content": "1"}]

    def step(self, text):
        if self.row.get("fault") == "raise":
            raise OSError("broken")
        return StepResult([{"role": "user", "content": "2"}])

    def close(self):
        with open(self.row["file"], "a") as file:
            print(self.row["name"], file=file)
        if self.row.get("fault") == "close":
            raise OSError("it cannot be closed")
        if self.row.get("fault") == "hang":
            time.sleep(600)


class ClosesLater(Closes):
    """The same with coroutine functions."""

    async def reset(self):
        return Closes.reset(self)

    async def close(self):
        Closes.close(self)
