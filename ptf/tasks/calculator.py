"""An agent with a tool, small enough for a CPU: it is asked for a sum of two digits,
may write the sum to a calculator, and says what that answers.

The calculator adds a third digit, drawn anew for every episode, and shows the last digit: what the answer is,
only the tool can tell.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.rl.environments.protocol import Message, Turn
from ptf.tasks.tiny import write_model


class Calculator:
    """Two turns: a call that begins with the sum, `3+4`, and an answer that begins with what came back. Each of the
    call's characters that is right is worth an eighth; an answer that is nothing but the result another half, or three
    eighths if more follows, and an eighth is for a call that is nothing but the sum."""

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.result = row, None
        self.third = random.Random(seed).randrange(10)

    def begin(self) -> Sequence[Message]:
        """Return the messages that the episode begins with."""
        return self.row["messages"]

    def act(self, text: str) -> Turn:
        """Return what follows the agent's text, with its reward in [0, 1]."""
        wanted = self.row["messages"][-1]["content"]
        if self.result is not None:
            return Turn(reward=0.5 * (text == self.result) or 0.375 * text.startswith(self.result), done=True)
        reward = (sum(a == b for a, b in zip(text, wanted, strict=False)) + (text == wanted)) / 8
        if not text.startswith(wanted):
            return Turn(reward=reward, done=True)
        self.result = str((int(text[0]) + int(text[2]) + self.third) % 10)
        return Turn([{"role": "tool", "content": self.result}], reward=reward)


def prepare(directory: str) -> None:
    """`train.jsonl` and `test.jsonl` of prompts, 80 and 20 of the hundred sums; `calls.jsonl`, dialogues with the
    calculator to imitate; and `model/`."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    sums = [f"{a}+{b}" for a in range(10) for b in range(10)]
    random.Random("calculator").shuffle(sums)
    for name, part in (("train", sums[:80]), ("test", sums[80:])):
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": [{"role": "user", "content": s}]}) + "\n" for s in part)
        )

    def messages(s, d):
        return [("user", s), ("assistant", s), ("tool", d), ("assistant", d)]

    calls = [
        [{"role": role, "content": text} for role, text in messages(s, str(d))] for s in sums[:80] for d in range(10)
    ]
    (root / "calls.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in calls))
    write_model(root / "model", "0123456789+", dim=64, layers=2)
