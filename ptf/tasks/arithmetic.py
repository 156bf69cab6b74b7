"""Sums and differences of two numbers: a task that a small model learns on a CPU in a minute.

What is held out is the unordered pair of operands. No sum or difference of a tested pair, in either order, is ever
trained on.
"""

import random
from collections.abc import Mapping
from typing import Any

from ptf.errors import UserError
from ptf.tasks.tiny import Question, write_task


def prepare(
    directory: str,
    *,
    seed: int = 0,
    train: int | None = None,
    held_out: int = 500,
    high: int = 99,
    shuffle_answers: bool = False,
) -> None:
    """Write the task (see `write_task`). Operands are 1 to `high`; a tenth of the pairs is for dev, a tenth for test,
    the rest to train on. `train`: how many questions to train on, all by default; `held_out`:
    how many in each of dev and test."""
    rng = random.Random(f"arithmetic/{seed}")
    pairs = [(a, b) for a in range(1, high + 1) for b in range(a, high + 1)]
    rng.shuffle(pairs)
    tenth = len(pairs) // 10
    dev, test, rest = (
        [q for pair in part for q in questions(*pair)]
        for part in (pairs[:tenth], pairs[tenth : 2 * tenth], pairs[2 * tenth :])
    )
    for part in (dev, test, rest):
        rng.shuffle(part)
    if len(dev) < held_out or len(test) < held_out or len(rest) < (train or 1):
        raise UserError(
            f"operands up to {high} make {len(rest)} questions to train on and {min(len(dev), len(test))} to hold "
            "out; raise `high`"
        )
    rest = rest[:train]
    write_task(
        directory,
        train=rest,
        prompts=rest,
        dev=dev[:held_out],
        test=test[:held_out],
        shuffle_answers=shuffle_answers,
        seed=seed,
    )


def questions(a: int, b: int) -> list[Question]:
    """All that is asked about a pair."""
    return [
        (f"{x}{op}{y}=", str(x + y if op == "+" else x - y)) for x, y in dict.fromkeys([(a, b), (b, a)]) for op in "+-"
    ]


def exact(row: Mapping[str, Any], text: str) -> float:
    """Reward: 1 where the text is the answer."""
    return float(text.strip() == row["answer"])
