"""Players for tests of environments: episodes through the real worker processes, and scripted opponents."""

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.config import Plugin
from ptf.rl.environments.protocol import Environments, StepResult

Policy = Callable[[Sequence[Mapping[str, Any]]], str]  # the conversation so far → the next answer


@dataclass(frozen=True)
class Played:
    """One episode: the conversation, the result of each turn, and the tools."""

    messages: list[Mapping[str, Any]]
    results: list[StepResult]
    tools: Any

    @property
    def reward(self) -> float:
        return sum(result.reward for result in self.results)


def environments(use: str, args: dict[str, Any], **options: Any) -> contextlib.closing[Environments]:
    return contextlib.closing(Environments(Plugin(use=use, args=args), **{"timeout_s": 60.0, "retries": 0, **options}))


async def episode(
    made: Environments, policy: Policy, row: Mapping[str, Any], seed: int = 0, most_turns: int = 30
) -> Played:
    state, first, tools = await made.reset(row, seed)
    messages, results = list(first), list[StepResult]()
    while len(results) < most_turns and not (results and results[-1].done):
        text = policy(messages)
        results.append(await made.step(state, text))
        own = results[-1].policy_message or {"role": "assistant", "content": text}
        messages += [own, *results[-1].environment_messages]
    await made.end(state)
    return Played(messages, results, tools)


def play(made: Environments, policy: Policy, rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[Played]:
    """Play one episode for each row, all at once."""

    async def all_of_them() -> list[Played]:
        return await asyncio.gather(*(episode(made, policy, row, seed) for row in rows))

    return asyncio.run(all_of_them())


def play_here(environment: Any, policy: Policy, most_turns: int = 30) -> Played:
    """Play one episode in this process."""
    messages, results = list(environment.reset()), list[StepResult]()
    while len(results) < most_turns and not (results and results[-1].done):
        text = policy(messages)
        results.append(environment.step(text))
        messages += [{"role": "assistant", "content": text}, *results[-1].environment_messages]
    return Played(messages, results, None)


def last(messages: Sequence[Mapping[str, Any]]) -> str:
    return messages[-1]["content"]


def random_square(messages: Sequence[str], rng: random.Random) -> str:
    """An opponent in tic-tac-toe that takes a random free square."""
    return rng.choice(re.findall(r"'(\[\d\])'", messages[-1].rpartition("Available Moves")[2]))


def resigns(messages: Sequence[str], rng: random.Random) -> str:
    """An opponent whose moves are invalid, so that it loses."""
    return "I do not know"


def rolls(messages: Sequence[str], rng: random.Random) -> str:
    """An opponent in a game of dice that never stops."""
    return "[roll]"
