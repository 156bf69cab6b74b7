"""An agent with a tool, small enough for a CPU: it gets a sum of two digits, sends it to a calculator, and answers with
the calculator's result.

The calculator adds a third digit, which is random in every episode, and returns the last digit of the total. So the
agent cannot know the right answer without the tool.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.rl.environments.protocol import Message, StepResult
from ptf.tasks.tiny import write_model, write_rows
from ptf.tasks.tool_calculator import sums, write_sums


class Calculator:
    """Environment of two turns: a call, which must begin with the sum, such as `3+4`, and a last response.

    Rewards: 1/8 for each correct character of the call, and 1/8 if the call has nothing after the sum; 1/2 if the
    last response is exactly the result, 3/8 if it begins with the result. A call that does not begin with the sum ends
    the episode.
    """

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.result = row, None
        self.third = random.Random(seed).randrange(10)

    def reset(self) -> Sequence[Message]:
        """Return the messages that the episode begins with."""
        return self.row["messages"]

    def step(self, text: str) -> StepResult:
        """Return the calculator's message after the agent's text, with the turn's reward, in [0, 1/2]."""
        wanted = self.row["messages"][-1]["content"]
        if self.result is not None:
            return StepResult(reward=0.5 * (text == self.result) or 0.375 * text.startswith(self.result), done=True)
        reward = (sum(a == b for a, b in zip(text, wanted, strict=False)) + (text == wanted)) / 8
        if not text.startswith(wanted):
            return StepResult(reward=reward, done=True)
        self.result = str((int(text[0]) + int(text[2]) + self.third) % 10)
        return StepResult([{"role": "tool", "content": self.result}], reward=reward)


def prepare(directory: str) -> None:
    """Write `train.jsonl` and `test.jsonl` (prompts, 80 and 20 of the hundred sums), `calls.jsonl` (dialogues with the
    calculator, for SFT) and `model/`."""
    root = Path(directory)
    write_sums(root)
    calls = [
        [("user", f"{a}+{b}"), ("assistant", f"{a}+{b}"), ("tool", f"{d}"), ("assistant", f"{d}")]
        for a, b in sums()[:80]
        for d in range(10)
    ]
    write_rows(
        root / "calls.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in call]} for call in calls],
    )
    write_model(root / "model", "0123456789+", dim=64, layers=2)
