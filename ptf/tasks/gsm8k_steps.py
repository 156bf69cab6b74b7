"""The calculator steps of GSM8K, such as `<<48/2=24>>`: expressions in the four operations, short enough for a small
model.

Steps are held out by expression, the text before `=`: no expression of test.jsonl or dev.jsonl is in the training data,
neither among the steps of the training problems nor among the generated ones.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ptf.tasks.tiny import Question, public_file, write_task

STEP = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
NUMBER = re.compile(r"\d+\.\d+|\.\d+|\d+")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def prepare(
    directory: str,
    *,
    data: str | None = None,
    generated: int = 20000,
    held_out: int = 500,
    seed: int = 0,
    shuffle_answers: bool = False,
) -> None:
    """Write the task (see `write_task`) from `gsm8k/` under `data` (default: $PTF_DATA, else ../shared/data).

    dev has `held_out` expressions of the training problems; test has all expressions of the test problems that are in
    no training problem. `generated` expressions are generated and added to the data for SFT.
    """
    known = steps(public_file(data, "gsm8k/train.jsonl"))
    rng = random.Random(f"gsm8k_steps/{seed}")
    expressions = list(dict.fromkeys(question for question, _ in known))
    dev_expressions = set(rng.sample(expressions, held_out))
    train = [step for step in known if step[0] not in dev_expressions]
    dev = [step for step in _once(known) if step[0] in dev_expressions]
    test = [
        step for step in _once(steps(public_file(data, "gsm8k/test_first819.jsonl"))) if step[0] not in set(expressions)
    ]
    extra = generate(expressions, generated, rng, avoid={*expressions, *(question for question, _ in test)})
    print(
        f"gsm8k_steps: {len(known)} distinct steps ({len(expressions)} distinct expressions) "
        f"in the training problems: {len(train)} to train on, "
        f"{len(dev)} in dev; {len(extra)} generated; {len(test)} expressions in test"
    )
    rng.shuffle(train)
    imitate = train + extra
    rng.shuffle(imitate)
    write_task(directory, train=imitate, prompts=train, dev=dev, test=test, shuffle_answers=shuffle_answers, seed=seed)


def steps(path: Path) -> list[Question]:
    """Return the distinct steps of the problems in a file, in order of appearance.

    Two steps are equal if the text between << and >> is equal.
    """
    with path.open() as lines:
        found = [step for line in lines for step in STEP.findall(json.loads(line)["answer"])]
    return [(f"{expression}=", answer) for expression, answer in dict.fromkeys(found)]


def _once(found: Sequence[Question]) -> list[Question]:
    """Return the first step of each expression."""
    return list({question: (question, answer) for question, answer in reversed(found)}.values())[::-1]


def generate(patterns: Sequence[str], n: int, rng: random.Random, avoid: set[str]) -> list[Question]:
    """Return n new expressions with their values.

    An expression is one of `patterns` in which some numbers are replaced by random ones with as many digits. Its value
    has at most two decimals, and it is not in `avoid`.
    """
    made: dict[str, str] = {}
    while len(made) < n:
        question = NUMBER.sub(
            lambda found: _redraw(found.group(), rng) if rng.random() < 0.7 else found.group(), rng.choice(patterns)
        )
        if question not in avoid and question not in made:
            answer = decimal(question.rstrip("="))
            if answer is not None:
                made[question] = answer
    return list(made.items())


def _redraw(number: str, rng: random.Random) -> str:
    """Return a random number of the same form; its first digit is 0 only if it was 0 before."""
    return "".join(
        c if c == "." or (c == "0" and i == 0) else str(rng.randint(i == 0, 9)) for i, c in enumerate(number)
    )


def decimal(expression: str) -> str | None:
    """Return the exact value of an expression as a decimal number without trailing zeros.

    Return None if it is negative, undefined, or has more than two decimals.
    """
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (ZeroDivisionError, SyntaxError, KeyError):  # KeyError: an unsupported operator, such as //
        return None
    cents = value * 100
    if value < 0 or cents.denominator != 1:
        return None
    return f"{cents.numerator // 100}.{cents.numerator % 100:02d}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand))
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))


def numeric(row: Mapping[str, Any], text: str) -> float:
    """Return the reward: 1 if the text is the reference answer, otherwise 0. Numbers are compared by value
    (0.50 is 0.5)."""
    given, answer = text.strip(), row["answer"].strip()
    try:
        return float(Fraction(given) == Fraction(answer))
    except (ValueError, ZeroDivisionError):
        return float(given == answer)
