"""Rows for the jobs in this directory: small functions to write in Python, judged by tests, and sums for an agent with
a tool."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.tasks import tool_calculator

PICKED: Mapping[str, Callable[[int], bool]] = {
    "even numbers": lambda n: n % 2 == 0,
    "odd numbers": lambda n: n % 2 == 1,
    "positive numbers": lambda n: n > 0,
    "negative numbers": lambda n: n < 0,
    "multiples of three": lambda n: n % 3 == 0,
    "multiples of five": lambda n: n % 5 == 0,
    "numbers greater than ten": lambda n: n > 10,
    "numbers less than seven": lambda n: n < 7,
    "numbers that are not zero": lambda n: n != 0,
    "numbers between 1 and 20, both included,": lambda n: 1 <= n <= 20,
    "numbers whose square is less than 50": lambda n: n * n < 50,
    "numbers that end in the digit 2": lambda n: abs(n) % 10 == 2,
    "positive even numbers": lambda n: n > 0 and n % 2 == 0,
    "negative odd numbers": lambda n: n < 0 and n % 2 == 1,
    "multiples of both two and three": lambda n: n % 6 == 0,
    "numbers with one digit": lambda n: abs(n) < 10,
}
MADE: Mapping[str, Callable[[list[int]], Any]] = {
    "the sum of the {}": sum,
    "how many {} there are": len,
    "the largest of the {}, or 0 if there are none": lambda found: max(found, default=0),
    "the smallest of the {}, or 0 if there are none": lambda found: min(found, default=0),
    "a list of the {}, in their order": list,
    "a sorted list of the {}": sorted,
    "a list of the squares of the {}, in their order": lambda found: [n * n for n in found],
    "the sum of the squares of the {}": lambda found: sum(n * n for n in found),
    "the {} in reverse order, as a list": lambda found: found[::-1],
    "the first of the {}, or None if there are none": lambda found: found[0] if found else None,
}
ASKED = "Write a Python function `solve(numbers)` that gets a list of integers and returns {}. Give only the code."
SYSTEM = "You have a tool that adds. Call it once with the two numbers, then answer with its result alone."
Row = dict[str, Any]


def functions(directory: str, *, held_out: int = 100):
    """Write `train.jsonl` and `test.jsonl`: 160 functions to write, with three tests each."""
    draw = random.Random("functions")
    rows = list[Row]()
    for picked, takes in PICKED.items():
        for made, of in MADE.items():
            lists = [[], *([draw.randrange(-30, 31) for _ in range(12)] for _ in range(2))]
            tests = [f"assert solve({given}) == {of([n for n in given if takes(n)])!r}" for given in lists]
            asked = ASKED.format(made.format(picked))
            rows.append({"messages": [{"role": "user", "content": asked}], "tests": tests})
    draw.shuffle(rows)
    write(directory, "train", rows[held_out:])
    write(directory, "test", rows[:held_out])


def sums(directory: str):
    """Write `train.jsonl` and `test.jsonl`: 40 and 100 sums of two numbers below 100, each with a seed of its own."""
    draw = random.Random("sums")
    rows = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{draw.randrange(100)}+{draw.randrange(100)}"},
            ],
            "seed": draw.randrange(2**31),
        }
        for _ in range(140)
    ]
    write(directory, "train", rows[100:])
    write(directory, "test", rows[:100])


def agent(row: Mapping[str, Any], base_url: str, api_key: str, seed: int) -> float:
    """Play an episode of `ptf.tasks.tool_calculator`, whose hidden digit is the row's: so its reward can be computed
    again from the text alone (`reward_of`)."""
    return tool_calculator.agent(row, base_url, api_key, row["seed"])


def reward_of(row: Mapping[str, Any], turns: Sequence[str]) -> float:
    """Return the reward of an episode from its turns as the model wrote them."""
    a, b = (int(number) for number in row["messages"][-1]["content"].split("+"))
    result = str((a + b + random.Random(row["seed"]).randrange(10)) % 10)
    _, _, call = turns[0].partition("<tool_call>")
    call, closed, _ = call.partition("</tool_call>")
    try:
        made = json.loads(call)
        given = made["arguments"]
        right = (given["a"] == a) + (given["b"] == b)
    except (ValueError, TypeError, KeyError):
        return 0.0
    if not closed or made.get("name") != "add":
        return 0.0
    if right < 2 or len(turns) < 2:
        return 0.25 * right
    return 0.5 + (0.5 if turns[1] == result else 0.375 if turns[1].startswith(result) else 0.0)


def write(directory: str, name: str, rows: Sequence[Row]) -> None:
    """Write rows to `name.jsonl`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}: {len(rows)} rows", flush=True)
