"""Environments for tests."""

import os
import random
import signal
import time
from dataclasses import replace

from ptf.rl.environments.protocol import StepResult


class Replay:
    """The other side of a recorded conversation. What the policy said is taken for what was recorded."""

    def __init__(self, row, seed):
        self.messages, self.tools = row["messages"], row.get("tools")
        self.at = next(i for i, m in enumerate(self.messages) if m["role"] == "assistant")

    def reset(self):
        return self.messages[: self.at]

    def step(self, text):
        recorded = self.messages[self.at]
        following = self.messages[self.at + 1 :]
        n = next((i for i, m in enumerate(following) if m["role"] == "assistant"), None)
        if n is None:
            return StepResult(reward=1.0, done=True, policy_message=recorded)
        self.at += 1 + n
        return StepResult(following[:n], policy_message=recorded)


class Echo:
    """Replies with the length of the answer and a number from its seed; ends after `turns`. The row says what goes
    wrong, and when."""

    def __init__(self, row, seed, turns=3):
        self.row, self.rng, self.turns, self.heard = row, random.Random(seed), turns, 0

    def reset(self):
        if self.row.get("fault") == "no beginning":
            return [1.0]
        return [{"role": "user", "content": str(self.rng.randrange(10))}]

    def step(self, text):  # noqa: C901  one branch for each fault
        self.heard += 1
        if self.heard == self.row.get("at") and not (self.row.get("once") and self.first()):
            fault = self.row["fault"]
            if fault == "raise":
                raise OSError("the database is away")
            if fault == "hang":
                time.sleep(600)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "garbage":
                return {"reward": 1.0}
            if fault == "nan":
                return StepResult(reward=float("nan"), done=True)
            if fault == "no number":
                return StepResult(reward=None, done=True)
            if fault == "no messages":
                return StepResult(environment_messages=None)
            if fault == "fork":
                os.fork()  # both answer
            if fault == "overflow":
                return StepResult(reward=10**400, done=True)
            if fault == "no data":
                return StepResult([{"role": "user", "content": lambda: "1"}])
            if fault == "text":
                return StepResult(reward="1.0", done=True)  # pyright: ignore[reportArgumentType]
            if fault == "silent":
                return StepResult()
        return StepResult(
            [{"role": "user", "content": f"{len(text) % 10}{self.rng.randrange(10)}"}],
            reward=0.25,
            done=self.heard == self.turns,
        )

    def first(self):
        """Return whether the fault has happened before. A file records it, because the process may be a different
        one."""
        seen = os.path.exists(self.row["once"])
        open(self.row["once"], "w").close()
        return seen


class Terse(Echo):
    """An environment that pays more for shorter texts, so that what was sampled decides how the weights move."""

    def step(self, text):
        return replace(super().step(text), reward=max(0.0, 1 - len(text) / 16) / self.turns)


class Dawdling(Terse):
    """An environment that takes a while, which is another one each time, for a reply that repeats."""

    def step(self, text):
        time.sleep(random.random() * 0.02)
        return super().step(text)


class Moody(Echo):
    """An environment that cannot be replayed, because it depends on more than its seed."""

    def reset(self):
        return [{"role": "user", "content": str(time.time_ns())}]  # never the same twice


class WithoutMethods:
    """An environment without a method."""

    def __init__(self, row, seed):
        pass


def made_without_methods(row, seed):
    return WithoutMethods(row, seed)
