"""A reward, an environment and an engine in which one thing fails at the n-th call of a run. They record in a file when
it did.

Calls are counted by bytes in a file, because a process that died starts its memory anew. A fault that `lasts` returns
for the same question and for no other, so a test can tell whether it was asked again. The module imports little,
because each process of a reward imports it.
"""

import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HANG_S = 600.0
LONGEST = 6  # characters of an answer of the tiny jobs


class NoNumber:
    def __float__(self) -> float:
        raise ArithmeticError("no number")


def pipe(number: int | None, data: bytes) -> None:
    os.write(int(sys.argv[1]) if number is None else number, data)


def befall(fault: str) -> None:
    """What goes wrong before there is an answer; nothing where the answer is what is wrong."""
    if fault == "raise":
        raise RuntimeError("out of order")
    if fault == "exit":
        sys.exit(0)
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "hang":
        time.sleep(HANG_S)
    elif fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(HANG_S)
    elif fault == "fork":
        os.fork()
    elif fault == "noise":
        pipe(None, struct.pack("!i", 5) + b"noise")
    elif fault == "half":
        pipe(None, struct.pack("!i", 100) + b"half")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "deaf":
        os.closerange(3, 4096)


ENDS = ["raise", "exit", "interrupt", "hang", "SIGSTOP", "SIGKILL", "SIGSEGV", "fork", "noise", "half", "deaf"]
REWARDS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "huge": 1e308,
    "minus huge": -1e308,
    "10**400": 10**400,
    "None": None,
    "a text": "0.5",
    "a list": [1.0],
    "a dict": {"reward": 1.0},
    "a complex number": 1j,
    "no number": NoNumber(),
}


class Counted:
    """The questions of a run, in all its processes."""

    def __init__(self, place: str, at: int, lasts: bool) -> None:
        self.place, self.at, self.lasts = Path(place), at, lasts

    def due(self, question: Any) -> bool:
        """Whether it goes wrong now; written down where it does."""
        with (self.place / "asked").open("ab") as file:
            file.write(b".")
        said, fired = json.dumps(question, sort_keys=True), self.place / "fired"
        first = json.loads(fired.read_text().splitlines()[0])["question"] if fired.exists() else None
        wrong = (self.place / "asked").stat().st_size >= self.at if first is None else self.lasts and first == said
        if wrong:
            with fired.open("a") as file:
                file.write(json.dumps({"time": time.time(), "question": said, "pid": os.getpid()}) + "\n")
        return wrong


def true_reward(row: Mapping[str, Any], text: str) -> float:
    return len(text) % 7 / 7 + int(row["answer"]) % 3 / 10


def reward(row: Mapping[str, Any], text: str, *, place: str, fault: str, at: int, lasts: bool) -> Any:
    if Counted(place, at, lasts).due([row["answer"], text]):
        befall(fault)
        return REWARDS.get(fault, true_reward(row, text))
    return true_reward(row, text)


class Environment:
    """Two turns; each is worth what `true_reward` says of it."""

    def __init__(self, row: Mapping[str, Any], seed: int, *, place: str, fault: str, at: int, lasts: bool) -> None:
        self.row, self.seed, self.rng, self.heard = row, seed, random.Random(seed), list[str]()
        self.fault, self.counted = fault, Counted(place, at, lasts)

    def reset(self) -> Any:
        if self.counted.due([self.row["answer"], self.seed]):
            befall(self.fault)
            if self.fault in REWARDS or self.fault in TURNS:
                return {"a list": [1.0], "None": None}.get(self.fault, 17)
        return [{"role": "user", "content": f"{self.rng.randrange(10)}+"}]

    def step(self, text: str) -> Any:
        from ptf.rl.environments.protocol import StepResult

        self.heard.append(text)
        said = [{"role": "user", "content": f"{self.rng.randrange(10)}-"}]
        right = StepResult(said, reward=true_reward(self.row, text), done=len(self.heard) == 2)
        if not self.counted.due([self.row["answer"], self.seed, *self.heard]):
            return right
        befall(self.fault)
        if self.fault in REWARDS:
            return StepResult(said, reward=REWARDS[self.fault], done=right.done)
        return {
            "no turn": 1.0,
            "too few messages": StepResult(),
            "no data": StepResult([{"role": "user", "content": lambda: 0}]),
            "no messages": StepResult(environment_messages=7),
        }.get(self.fault, right)  # pyright: ignore[reportArgumentType]


TURNS = ["no turn", "too few messages", "no data", "no messages"]
CALLS = [
    "raise",
    "NaN",
    "huge",
    "texts",
    "too few",
    "too many",
    "None",
    "empty",
    "longer",
    "other context",
    "other weights",
    "beyond the vocabulary",
    "fractions",
    "out of memory",
]
