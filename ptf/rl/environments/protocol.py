"""Environments: the other side of a conversation of several turns. An `Environment` is constructed from a data row,
used for one episode, and discarded.

Environments run in worker processes (ptf.rl.worker_process), many in one process. When one of them hangs
or dies, the other episodes of its process are replayed from the policy's texts, and must give the same replies as
before. The episode that failed is retried `retries` times; then it has no result. No failure of an environment becomes
a reward.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ptf.config import Plugin
from ptf.data.trajectory import is_reward
from ptf.errors import raise_if_old_names
from ptf.rl.worker_process import Fault, WorkerProcess

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

    All randomness must come from `seed`; otherwise the episode could not be replayed.
    """

    tools: Sequence[Mapping[str, Any]] | None  # JSON schemas for the chat template; may be missing

    def reset(self) -> Sequence[Message]:
        """Return the first messages; the policy answers to the last of them."""
        ...

    def step(self, text: str) -> StepResult:
        """Return the result of the policy's `text`, which is without its end-of-turn token."""
        ...


__getattr__ = raise_if_old_names(
    __name__,
    {
        "Turn": "is now StepResult(environment_messages, reward, done, policy_message); the methods of an environment "
        "are now `reset` (`begin`) and `step` (`act`)"
    },
)


class EnvironmentFault(Exception):
    """An environment failed, and so did its retries."""


@dataclass
class EpisodeState:
    """One episode's environment: the process it is in, and what is needed to replay it."""

    number: int
    process: "EnvironmentProcess"
    row: Mapping[str, Any]
    seed: int
    texts: list[str] = field(default_factory=list)  # of the policy, one for each turn
    replies: list[Any] = field(default_factory=list)
    incarnation: int = -1  # the one of its process in which it exists; -1: in none yet


class EnvironmentProcess:
    """A worker process with a thread that sends it one request at a time."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.incarnation = 0  # how many processes have died here before the present one
        self.thread = ThreadPoolExecutor(1)

    def ask(self, question: tuple) -> Any:
        """Return the reply, or a Fault."""
        reply = self.worker.ask(question)
        if isinstance(reply, Fault) and reply.fatal:
            self.incarnation += 1
        return reply


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
    messages: list[Any] = list(given) if isinstance(given, Sequence) else [None]
    if result.policy_message is not None:
        messages.append(result.policy_message)
    if not all(isinstance(message, Mapping) for message in messages):
        return Fault(f"the messages of a step are {str(given)[:60]!r}")
    return result


def checked_reset(reply: Any) -> Any:
    """Return the first messages and the tools, or a Fault that says what is wrong with them."""
    messages, _ = reply
    if not all(isinstance(message, Mapping) for message in messages):
        return Fault(f"reset returned {str(messages)[:60]}, which are no messages")
    return reply


class Environments:
    """Runs environments in `processes` worker processes."""

    def __init__(self, plugin: Plugin, *, processes: int = 1, timeout_s: float = 10.0, retries: int = 1) -> None:
        self.plugin, self.retries = plugin, retries
        workers = [WorkerProcess("environment", plugin, timeout_s) for _ in range(processes)]
        self.processes = [EnvironmentProcess(worker) for worker in workers]
        self.numbers = itertools.count()
        self.retried = 0  # requests that were retried
        self.reported = False  # whether a fault of this step was printed; the others are only counted

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[EpisodeState, list[Message], Any]:
        """Start an environment; return it, its first messages, and its tools. Raises EnvironmentFault."""
        number = next(self.numbers)
        state = EpisodeState(number, self.processes[number % len(self.processes)], dict(row), seed)
        messages, tools = await self._in_thread(state, None)
        return state, messages, tools

    async def step(self, state: EpisodeState, text: str) -> StepResult:
        """Return the result of the policy's text. Raises EnvironmentFault."""
        result = await self._in_thread(state, text)
        state.texts.append(text)
        return result

    async def end(self, state: EpisodeState) -> None:
        """Discard the environment."""
        if state.incarnation == state.process.incarnation:
            reply = await asyncio.get_running_loop().run_in_executor(
                state.process.thread, state.process.ask, ("end", state.number)
            )
            if isinstance(reply, Fault):  # the other episodes of the process are replayed
                self._report(reply.reason)

    def _report(self, reason: str) -> None:
        """Print the first fault of a step when it happens, because each later one may take the whole time limit."""
        if not self.reported:
            self.reported = True
            print(f"the environment {self.plugin.use} failed, and the episode is tried again: {reason}", flush=True)

    async def _in_thread(self, state: EpisodeState, text: str | None) -> Any:
        reply = await asyncio.get_running_loop().run_in_executor(
            state.process.thread, self._ask_with_retries, state, text
        )
        if isinstance(reply, Fault):
            raise EnvironmentFault(reply.reason)
        state.replies.append(reply)
        return reply

    def _ask_with_retries(self, state: EpisodeState, text: str | None) -> Any:
        """Return the reply to `text`, or with None to `reset`; a failed request is repeated with a replayed
        environment."""
        reply: Any = Fault("it was not asked")
        for attempt in range(1 + self.retries):
            if attempt:
                self.retried += 1
                state.incarnation = -1  # the environment may be in any state, so it is replayed
            reply = self._ask(state, text)
            if not isinstance(reply, Fault):
                break
            self._report(reply.reason)
        return reply

    def _ask(self, state: EpisodeState, text: str | None) -> Any:
        process = state.process
        reset = ("reset", state.number, state.row, state.seed)
        questions: list[tuple] = []
        if state.incarnation != process.incarnation:
            questions = [reset, *(("step", state.number, earlier) for earlier in state.texts)]
        for question, before in zip(questions, state.replies, strict=False):
            reply = process.ask(question)
            if isinstance(reply, Fault):
                return reply
            if repr(reply) != repr(before):
                return Fault(
                    "replayed after its process died, it did not give the same replies as before; "
                    "all randomness in it must come from its seed"
                )
        state.incarnation = process.incarnation
        if text is None:
            reply = process.ask(reset)
            return reply if isinstance(reply, Fault) else checked_reset(reply)
        reply = process.ask(("step", state.number, text))
        return reply if isinstance(reply, Fault) else checked_step(reply)

    def take_retries(self) -> int:
        """Return how many requests were retried since the last call; the next fault is printed again."""
        retried, self.retried, self.reported = self.retried, 0, False
        return retried

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.thread.shutdown(wait=False, cancel_futures=True)
            process.worker.close()
