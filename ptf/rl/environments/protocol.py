"""Environments: the other side of a conversation of several turns. An `Environment` is constructed from a data row,
used for one episode, and discarded.

Environments run in worker processes (ptf.rl.worker_process), many in one process, and their methods at the same time:
coroutine functions, or plain functions, for which each environment has a thread. When one of them ends its process, the
other episodes of that process are replayed from the policy's texts, and must give the same replies as before. The
episode that failed is retried `retries` times; then it has no result. No failure of an environment becomes a reward.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ptf.config import Plugin
from ptf.data.trajectory import is_reward
from ptf.rl.worker_messages import Fault, Interrupted
from ptf.rl.worker_process import WorkerProcess

Message = Mapping[str, Any]  # role, content, tool_calls, … as chat templates take them


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step of an environment gives for the policy's message."""

    environment_messages: Sequence[Message] = ()  # a tool's result, a user's next message; none if the episode is done
    reward: float = 0.0  # of this turn; the reward of an episode is the sum over its turns
    done: bool = False
    # the policy's message as a server would have parsed it (`tool_calls`, …); None: its text as the content
    policy_message: Message | None = None


class Environment(Protocol):
    """One episode's environment, constructed as `make(row, seed, **args)`.

    All randomness must come from `seed`; otherwise the episode could not be replayed. A method `close`, if there is
    one, is called after the episode, or before it is replayed; it is not called when the process itself is ended.
    """

    tools: Sequence[Mapping[str, Any]] | None  # JSON schemas for the chat template; may be missing

    def reset(self) -> Sequence[Message]:
        """Return the first messages; the policy answers to the last of them."""
        ...

    def step(self, text: str) -> StepResult:
        """Return the result of the policy's `text`, which is without its end-of-turn token."""
        ...


class EnvironmentFault(Exception):
    """An environment failed, and so did its retries."""


@dataclass
class EpisodeState:
    """One episode's environment: the process it is in, and what is needed to replay it."""

    number: int
    process: WorkerProcess
    asked: list[tuple[tuple, Any]] = field(default_factory=list)  # each question with its reply
    present: bool = False  # whether the environment exists in its process, as far as is known


def checked_step(result: Any) -> Any:
    """Return the result of a step, or a Fault that says what is wrong with it."""
    if not isinstance(result, StepResult):
        return Fault(f"step returned a {type(result).__name__}, not a ptf.rl.environments.protocol.StepResult")
    try:
        valid = not isinstance(result.reward, str | bytes | bytearray) and is_reward(float(result.reward))
    except Exception as error:  # float() of any object may raise anything
        return Fault(f"the reward of a step is not a number: {type(error).__name__}: {error}")
    if not valid:
        return Fault(f"the reward of a step is {result.reward!r}")
    given = result.environment_messages
    messages: list[Any] = [*given, result.policy_message or {}] if isinstance(given, Sequence) else [None]
    if not all(isinstance(message, Mapping) for message in messages):
        return Fault(f"the messages of a step are {str(given)[:60]!r}")
    return result


def checked_reset(reply: Any) -> Any:
    """Return the first messages and the tools, or a Fault that says what is wrong with them."""
    messages, _ = reply
    if not all(isinstance(message, Mapping) for message in messages):
        return Fault(f"reset returned {str(messages)[:60]}, which are no messages")
    return reply


MOST_LOSSES = 100  # of one question: how often the process may end beside it


class Environments:
    """Runs environments in `processes` worker processes, many in each."""

    def __init__(self, plugin: Plugin, *, processes: int = 1, timeout_s: float = 10.0, retries: int = 1) -> None:
        self.plugin, self.retries = plugin, retries
        self.processes = [WorkerProcess("environment", plugin, timeout_s) for _ in range(processes)]
        self.numbers = itertools.count()
        self.retried = 0  # requests that were retried
        self.reported = False  # whether a fault of this step was printed; the others are only counted

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[EpisodeState, list[Message], Any]:
        """Start an environment; return it, its first messages, and its tools. Raises EnvironmentFault."""
        number = next(self.numbers)
        state = EpisodeState(number, self.processes[number % len(self.processes)])
        messages, tools = await self._ask(state, ("reset", number, dict(row), seed))
        return state, messages, tools

    async def step(self, state: EpisodeState, text: str) -> StepResult:
        """Return the result of the policy's text. Raises EnvironmentFault."""
        return await self._ask(state, ("step", state.number, text))

    async def end(self, state: EpisodeState) -> None:
        """Discard the environment."""
        if state.present:
            state.process.ask(("end", state.number))

    async def _ask(self, state: EpisodeState, question: tuple) -> Any:
        """Return the reply to a question; a failed one is repeated with a replayed environment. Raises
        EnvironmentFault."""
        failures = losses = 0
        alone = False
        while True:
            reply = await self._ask_once(state, question, alone)
            if isinstance(reply, Interrupted) and losses < MOST_LOSSES:  # it is not known to be at fault
                state.present, alone, losses = False, alone or reply.suspect, losses + 1
                continue
            if isinstance(reply, Interrupted):
                reply = Fault(f"its process ended {losses} times")
            if not isinstance(reply, Fault):
                state.asked.append((question, reply))
                return reply
            state.present = False  # the environment may be in any state, so it is replayed
            if not self.reported:  # at once, because each later one may take the whole time limit
                self.reported = True
                print(
                    f"the environment {self.plugin.use} failed, and the episode is tried again: {reply.reason}",
                    flush=True,
                )
            if failures == self.retries:
                if not reply.fatal:
                    state.process.ask(("end", state.number))
                raise EnvironmentFault(reply.reason)
            failures += 1
            self.retried += 1

    async def _ask_once(self, state: EpisodeState, question: tuple, alone: bool) -> Any:
        """Return the reply, a Fault, or Interrupted; the environment is replayed first if it does not exist."""

        async def ask(question: tuple) -> Any:
            return await asyncio.wrap_future(state.process.ask(question, alone=alone))

        for earlier, before in [] if state.present else state.asked:
            reply = await ask(earlier)
            if isinstance(reply, Fault | Interrupted):
                return reply
            if repr(reply) != repr(before):
                return Fault(
                    "replayed after its process died, it did not give the same replies as before; "
                    "all randomness in it must come from its seed"
                )
        state.present = bool(state.asked)  # now, so that an episode which is cancelled meanwhile ends its environment
        reply = await ask(question)
        if isinstance(reply, Fault | Interrupted):
            return reply
        state.present = True
        return checked_reset(reply) if question[0] == "reset" else checked_step(reply)

    def take_retries(self) -> int:
        """Return how many requests were retried since the last call; the next fault is printed again."""
        retried, self.retried, self.reported = self.retried, 0, False
        return retried

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.close()
