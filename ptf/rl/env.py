"""Environments: the other side of a conversation with turns. An `Environment` is made from a data row, played once, and thrown away.

The one idea: environments run in processes of their own (ptf.rl.child), many to a process. When one of them hangs or dies, the others of its process are
played again up to where they were, from what the policy has said, and must answer as they did; the one that did it is tried once more, and then its
episode has no result. No failure of an environment becomes a reward.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ptf.config import Plug
from ptf.data.trajectory import is_reward
from ptf.rl.child import Child, Fault

Message = Mapping[str, Any]  # role, content, tool_calls, … as chat templates take them


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to what the policy said."""

    messages: Sequence[Message] = ()  # a tool's result, a user's next message; none where it is done
    reward: float = 0.0  # of this turn; an episode's is their sum
    done: bool = False
    said: Message | None = None  # the policy's own message as a server would have parsed it (`tool_calls`, …); None: its text as the content


class Environment(Protocol):
    """Made as `make(row, seed, **args)`; all that is random in it comes from `seed`, or it could not be played again."""

    tools: Sequence[Mapping[str, Any]] | None  # JSON schemas that the chat template shows; may be left out

    def begin(self) -> Sequence[Message]:
        """What the policy is shown first; it ends before the policy's turn."""
        ...

    def act(self, text: str) -> Turn:
        """`text` is what the policy said, without its end-of-turn token."""
        ...


class EnvironmentFault(Exception):
    """An environment did not answer, twice."""


@dataclass
class Played:
    """One episode's environment, wherever it is."""

    number: int
    home: "Process"
    row: Mapping[str, Any]
    seed: int
    heard: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    born: int = -1  # which life of its process it lives in; -1: in none yet


class Process:
    """A child with a thread that asks it one question at a time."""

    def __init__(self, child: Child) -> None:
        self.child, self.lives, self.thread = child, 0, ThreadPoolExecutor(1)

    def ask(self, question: tuple) -> Any:
        reply = self.child.ask(question)
        if isinstance(reply, Fault) and reply.fatal:
            self.lives += 1
        return reply


def checked(turn: Any) -> Any:
    """The turn, or what is wrong with it."""
    if not isinstance(turn, Turn):
        return Fault(f"act gave a {type(turn).__name__}, not a ptf.rl.env.Turn")
    try:
        right = not isinstance(turn.reward, str | bytes | bytearray) and is_reward(float(turn.reward))
    except Exception as error:  # of float(), for whatever it was given
        return Fault(f"the reward of a turn is no number: {type(error).__name__}: {error}")
    if not right:
        return Fault(f"the reward of a turn is {turn.reward!r}")
    said = [*turn.messages, *([] if turn.said is None else [turn.said])] if isinstance(turn.messages, Sequence) else [None]
    return turn if all(isinstance(message, Mapping) for message in said) else Fault(f"the messages of a turn are {str(turn.messages)[:60]!r}")


def opened(reply: Any) -> Any:
    """What it begins with, its messages and tools, or what is wrong with it."""
    messages, _ = reply
    return reply if all(isinstance(message, Mapping) for message in messages) else Fault(f"begin gave {str(messages)[:60]}, which are no messages")


class Environments:
    """Makes environments and plays them, in `processes`."""

    def __init__(self, what: Plug, *, processes: int = 1, timeout_s: float = 10.0, retries: int = 1) -> None:
        self.what, self.retries = what, retries
        self.homes = [Process(Child("environment", what, timeout_s)) for _ in range(processes)]
        self.numbers = itertools.count()
        self.again = 0  # questions that were asked once more
        self.told = False  # whether a fault of this step was said; of the others their number is

    async def begin(self, row: Mapping[str, Any], seed: int) -> tuple[Played, list[Message], Any]:
        """An environment, what it shows first, and its tools. Raises EnvironmentFault."""
        number = next(self.numbers)
        played = Played(number, self.homes[number % len(self.homes)], dict(row), seed)
        messages, tools = await self._in_thread(played, None)
        return played, messages, tools

    async def act(self, played: Played, text: str) -> Turn:
        """Raises EnvironmentFault."""
        turn = await self._in_thread(played, text)
        played.heard.append(text)
        return turn

    async def end(self, played: Played) -> None:
        if played.born == played.home.lives:
            reply = await asyncio.get_running_loop().run_in_executor(played.home.thread, played.home.ask, ("end", played.number))
            if isinstance(reply, Fault):  # nothing is lost, but for what lives beside it and is played again
                self._tell(reply.reason)

    def _tell(self, reason: str) -> None:
        """When it happens."""
        if not self.told:
            self.told = True
            print(f"the environment {self.what.use} did not answer: {reason}", flush=True)

    async def _in_thread(self, played: Played, text: str | None) -> Any:
        reply = await asyncio.get_running_loop().run_in_executor(played.home.thread, self._asked, played, text)
        if isinstance(reply, Fault):
            raise EnvironmentFault(reply.reason)
        played.answers.append(reply)
        return reply

    def _asked(self, played: Played, text: str | None) -> Any:
        """The answer to `text`, or with None what it begins with; asked again, of the environment played anew, where there was none."""
        reply: Any = Fault("it was not asked")
        for attempt in range(1 + self.retries):
            if attempt:
                self.again += 1
                played.born = -1  # whatever state it is in, it is not used
            reply = self._once(played, text)
            if not isinstance(reply, Fault):
                break
            self._tell(reply.reason)
        return reply

    def _once(self, played: Played, text: str | None) -> Any:
        home = played.home
        questions: list[tuple] = []
        if played.born != home.lives:
            questions = [("begin", played.number, played.row, played.seed), *(("act", played.number, heard) for heard in played.heard)]
        for question, before in zip(questions, played.answers, strict=False):
            reply = home.ask(question)
            if isinstance(reply, Fault):
                return reply
            if repr(reply) != repr(before):
                return Fault("played again after its process died, it did not answer as before; what is random in it must come from its seed")
        played.born = home.lives
        if text is None:
            reply = home.ask(("begin", played.number, played.row, played.seed))
            return reply if isinstance(reply, Fault) else opened(reply)
        reply = home.ask(("act", played.number, text))
        return reply if isinstance(reply, Fault) else checked(reply)

    def asked_again(self) -> int:
        """How many questions were asked once more since this was asked last; the next fault is said again."""
        again, self.again, self.told = self.again, 0, False
        return again

    def close(self) -> None:
        for home in self.homes:
            home.thread.shutdown(wait=False, cancel_futures=True)
            home.child.close()
