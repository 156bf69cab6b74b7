"""Rows for the jobs in this directory: OpenAssistant's conversations and preferences, and arithmetic in words.

The files of OpenAssistant are read from `chat/` and `prefs/` under $PTF_DATA (`make data`). Rows of one tree share what
the user asks first, so a tree is either trained on or held out. Lengths are in tokens of the model in `model`.
"""

import gzip
import hashlib
import json
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

MODEL = "data/models/smollm2-135m-instruct"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
WORDS += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]
ASKED = "Calculate {} {} {}. Give only the number in digits."
HOW_MANY = "How many {} does {} have? Give only the number in digits."
COUNTED = {  # things that are counted, and how many of them the owner has
    "days": [("a week", 7)],
    "months": [("a year", 12)],
    "hours": [("a day", 24)],
    "minutes": [("an hour", 60)],
    "seconds": [("a minute", 60)],
    "legs": [("a spider", 8), ("an insect", 6), ("a dog", 4), ("a chicken", 2)],
    "arms": [("an octopus", 8)],
    "wheels": [("a bicycle", 2), ("a car", 4), ("a tricycle", 3)],
    "sides": [("a triangle", 3), ("a square", 4), ("a pentagon", 5), ("a hexagon", 6), ("an octagon", 8)],
    "strings": [("a violin", 4), ("a guitar", 6)],
    "keys": [("a piano", 88)],
    "letters": [("the English alphabet", 26)],
    "cards": [("a deck", 52)],
    "players": [("a football team", 11), ("a basketball team", 5)],
    "squares": [("a chessboard", 64)],
    "faces": [("a cube", 6)],
    "fingers": [("a hand", 5)],
}
THINGS = """lamp chair table radio clock mirror carpet basket heater sofa pillow shelf camera printer bicycle helmet
kettle toaster guitar umbrella suitcase blender""".split()  # noqa: SIM905
MESSAGES = {
    "delivery": ["Where is my {}?", "The {} is two weeks late.", "When will the {} arrive?"],
    "billing": ["I paid twice for the {}.", "Please refund the {}.", "Send me the invoice for my {}."],
    "repair": ["My {} is broken.", "The {} makes a strange noise.", "The {} does not switch on."],
}
NUMBER = re.compile(r"\d+")
Row = dict[str, Any]


def conversations(directory: str, *, model: str = MODEL, longest: int = 384, trained: int = 250, permute: bool = False):
    """Write `train.jsonl`, `held_out.jsonl` and `swapped.jsonl`: conversations of at most `longest` tokens.

    A row is the longest beginning of a conversation that ends with an answer and fits. `swapped.jsonl` has the
    held-out rows, each with the last answer of another tree's row. With `permute`, each training row's last answer is
    another's, too: a control, from which no relation of question and answer can be learned.
    """
    tokenizer = Tokenizer.load(model)
    rows = dict[str, Row]()
    for row in read("chat/oasst_en100_paths.jsonl.gz"):
        turns = row["messages"]
        while turns and (turns[-1]["role"] != "assistant" or size(turns, tokenizer) > longest):
            turns = turns[:-1]
        if turns:
            rows[json.dumps(turns)] = {"messages": turns, "tree_id": row["tree_id"]}
    train, held_out = split(list(rows.values()))
    train = train[:trained]
    write(directory, "train", with_others(train) if permute else train)
    write(directory, "held_out", held_out)
    write(directory, "swapped", with_others(held_out))


def preferences(directory: str, *, model: str = MODEL, longest: int = 256, trained: int = 200, held_out: int = 120):
    """Write `train.jsonl` and `held_out.jsonl`: pairs of answers.

    Training answers have at most `longest` tokens, held-out ones twice as many. Of the held-out pairs, half prefer the
    shorter answer, so that the rule "the longer one is better" is right half of the time.
    """
    tokenizer = Tokenizer.load(model)
    rows = [row | sizes(row, tokenizer) for row in read("prefs/oasst_en100_pairs.jsonl.gz")]
    train, test = split([row for row in rows if row["length"] <= 2 * longest], share=0.4)
    shorter, longer = ([row for row in test if (row["more"] > 0) == more] for more in (False, True))
    each = min(len(shorter), len(longer), held_out // 2)
    for name, found in (
        ("train", [row for row in train if row["length"] <= longest][:trained]),
        ("held_out", shorter[:each] + longer[:each]),
    ):
        write(
            directory, name, [{key: row[key] for key in ("prompt", "chosen", "rejected", "tree_id")} for row in found]
        )


def sums(directory: str, *, held_out: int = 100, shuffle_answers: bool = False):
    """Write `train.jsonl` and `test.jsonl`, prompts of arithmetic in words with an `answer`, and `form.jsonl`:
    conversations that show the form of an answer, and no arithmetic.

    With `shuffle_answers` the training prompts have the answers of others: a control.
    """
    draw = random.Random("sums")
    questions = [("times", a, b, a * b) for a in range(1, 13) for b in range(1, 13)]
    questions += [("plus", a, b, a + b) for a in range(1, 21) for b in range(1, 4)]
    asked = [{**user(ASKED, WORDS[a], sign, WORDS[b]), "answer": str(answer)} for sign, a, b, answer in questions]
    draw.shuffle(asked)
    test, train = asked[:held_out], asked[held_out:]
    if shuffle_answers:
        answers = [row["answer"] for row in train]
        draw.shuffle(answers)
        train = [{**row, "answer": answer} for row, answer in zip(train, answers, strict=True)]
    facts = [(things, owner, n) for things, owners in COUNTED.items() for owner, n in owners]
    form = [
        {
            "messages": [
                *user(HOW_MANY, things, owner)["messages"],
                {"role": "assistant", "content": f"{owner[0].upper()}{owner[1:]} has {n} {things}."},
            ]
        }
        for things, owner, n in facts
    ]
    for name, found in (("train", train), ("test", test), ("form", form)):
        write(directory, name, found)


def tickets(directory: str):
    """Write `train.jsonl` and `test.jsonl`: messages to a shop, each with the team that answers it and the thing that
    it is about. The things of the test occur in no training row."""
    for name, things in (("train", THINGS[:16]), ("test", THINGS[16:])):
        rows = [
            {"prompt": words.format(thing), "completion": f"{team}: {thing}", "answer": f"{team}: {thing}"}
            for team, forms in MESSAGES.items()
            for words in forms
            for thing in things
        ]
        random.Random(name).shuffle(rows)
        write(directory, name, rows)


def user(text: str, *words: str) -> Row:
    """Return a row in which the user asks this, with the words in their places."""
    return {"messages": [{"role": "user", "content": text.format(*words)}]}


def right(row: Mapping[str, Any], text: str, *, wrong: float = 0.1) -> float:
    """Return the reward: 1 for the right number, `wrong` for another one, 0 where no number or several are given."""
    given = readable(text)
    return 0.0 if given is None else 1.0 if given == int(row["answer"]) else wrong


def readable(text: str) -> int | None:
    """Return the number that a response gives in digits; None where it gives none, or several."""
    found = NUMBER.findall(text)
    return int(found[0]) if len(found) == 1 else None


def read(name: str) -> Iterable[Row]:
    """Yield the rows of a file of the public data."""
    place = Path(os.environ.get("PTF_DATA") or "data") / name
    if not place.exists():
        raise UserError(f"there is no {place}: run `make data`, or set PTF_DATA to the directory that has {name}")
    with gzip.open(place, "rt") as lines:
        yield from map(json.loads, lines)


def size(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a conversation, about three of which are the template's for each turn."""
    return sum(len(tokenizer.encode(m["content"])) + 6 for m in messages)


def sizes(row: Mapping[str, Any], tokenizer: Tokenizer) -> Row:
    """Return the tokens of a pair's longer answer, and by how many the chosen answer is longer."""
    chosen, rejected = (len(tokenizer.encode(row[name])) for name in ("chosen", "rejected"))
    return {"length": max(chosen, rejected), "more": chosen - rejected}


def split(rows: Sequence[Row], share: float = 0.25) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and the held-out ones, about this share of the trees."""
    out = [int(hashlib.sha256(row["tree_id"].encode()).hexdigest(), 16) % 1000 < 1000 * share for row in rows]
    return (
        [row for row, held in zip(rows, out, strict=True) if not held],
        [row for row, held in zip(rows, out, strict=True) if held],
    )


def with_others(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, each with the last answer of one that belongs to another tree; each answer is given once."""
    order = sorted(range(len(rows)), key=lambda i: rows[i]["tree_id"])
    # every tree has fewer than half of the rows: moved by half of them, no answer stays in its tree
    taken = {i: order[(place + len(order) // 2) % len(order)] for place, i in enumerate(order)}
    if any(rows[i]["tree_id"] == rows[other]["tree_id"] for i, other in taken.items()):
        raise UserError("one tree has half of the rows: no permutation gives each row another tree's answer")
    return [{**row, "messages": [*row["messages"][:-1], rows[taken[i]]["messages"][-1]]} for i, row in enumerate(rows)]


def write(directory: str, name: str, rows: Sequence[Row]) -> None:
    """Write rows to `name.jsonl`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}: {len(rows)} rows", flush=True)
