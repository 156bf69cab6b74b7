"""Sums and differences of two numbers: a task that a small model learns on a CPU in a minute.

Unordered pairs of operands are held out: no sum or difference of a pair of dev or test, in either order, is in the
training data.
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
    model_type: str = "qwen3",
) -> None:
    """Write the task (see `write_task`).

    Operands are 1 to `high`. A tenth of the pairs is for dev, a tenth for test, and the rest for training. `train` is
    the number of training questions, by default all; `held_out` is the number in dev and in test.
    """
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
            f"operands up to {high} give {len(rest)} training questions and {min(len(dev), len(test))} held-out "
            "questions, fewer than requested; raise `high`"
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
        model_type=model_type,
    )


def questions(a: int, b: int) -> list[Question]:
    """Return all questions about a pair of operands, with their answers."""
    return [
        (f"{x}{op}{y}=", str(x + y if op == "+" else x - y)) for x, y in dict.fromkeys([(a, b), (b, a)]) for op in "+-"
    ]


def exact(row: Mapping[str, Any], text: str) -> float:
    """Return the reward: 1 if the text is the reference answer, otherwise 0."""
    return float(text.strip() == row["answer"])
