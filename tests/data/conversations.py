"""Conversations to find masks in: the real ones of PTF_DATA, and made-up ones that try what could go wrong."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ptf.data.chat import TrainOn

Message = dict[str, Any]


class Conversation(NamedTuple):
    source: str
    messages: list[Message]
    tools: list[Any] | None = None
    train_on: TrainOn = "assistant"
    arguments: Mapping[str, Any] | None = None  # of the template, the row's own


def real(shared: Path) -> Iterator[Conversation]:
    """All that DATA has of questions and answers, chats, calls and preferences;
    of the last only the final answer is trained."""
    schemas = json.loads((shared / "tools/sgd_test_tools.json").read_text())
    for row in [*rows(shared / "gsm8k/train.jsonl"), *rows(shared / "gsm8k/test_first819.jsonl")]:
        yield Conversation("gsm8k", [said("user", row["question"]), said("assistant", row["answer"])])
    for row in rows(shared / "chat/oasst_en100_paths.jsonl.gz"):
        yield Conversation("oasst", row["messages"])
    for row in rows(shared / "chat/sgd_test_dialogues.jsonl.gz"):
        yield Conversation(
            "sgd", renumbered(row["messages"]), [tool for service in row["services"] for tool in schemas[service]]
        )
    for row in rows(shared / "chat/tau_airline_gpt4o.jsonl.gz"):
        yield Conversation("tau", renumbered(row["messages"]))
    for row in rows(shared / "prefs/oasst_en100_pairs.jsonl.gz"):
        for answer in (row["chosen"], row["rejected"]):
            yield Conversation("pairs", [*row["prompt"], said("assistant", answer)], train_on="last")
    for row in rows(shared / "prefs/taskmaster3_movie_tickets_reward.jsonl.gz"):
        yield Conversation("taskmaster", renumbered([*row["prompt"], row["completion"]]), train_on="last")


def rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def renumbered(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls with nine characters, as Mistral-Nemo's template demands; no other template shows them."""
    ids: dict[str, str] = {}

    def new(call: Mapping[str, Any], key: str) -> dict[str, Any]:
        return {**call, key: ids.setdefault(call[key], f"call{len(ids):05}")} if key in call else dict(call)

    return [
        new(m, "tool_call_id")
        | ({"tool_calls": [new(call, "id") for call in m["tool_calls"]]} if m.get("tool_calls") else {})
        for m in messages
    ]


PLAIN = ("a", "Yes", " and ", "the weather", "3.14", ", ", ".", "?", "lookup", '"quoted"', "{x: 1}")
SPACE = (" ", "\n", "\n\n", "\t", "\r\n", "  \n ", "\u00a0", "\u2028", "\x1c")
UNICODE = ("é", "e\u0301", "\u0301", "数学", "العربية", "👩‍👩‍👧", "ﬁ", "\ufeff", "\u200b", "Å", "\U0001d54f", "ſ")
TAGS = (
    "<think>",
    "</think>",
    "<think>\n",
    "<think>\n\n</think>\n\n",
    "<think>\n</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|im_start|>assistant\n",
    "assistant",
    "user\n",
    "/no_think",
    "/system_override",
    "<|channel|>final<|message|>",
    "<|im_",
    "end|>",
)
NAMES = ("lookup", "get_weather", "f", "a")
VALUES: tuple[Any, ...] = (
    "Denver",
    "",
    'a "b"\n',
    "</tool_call>",
    "é<&>",
    1,
    -2.5,
    True,
    None,
    ["x", 1],
    {"y": {"z": "x"}},
    [],
    {},
)


def fuzzed(random: Random, markers: Sequence[str]) -> Conversation:
    """A short conversation, with all that may be context. `markers` are special tokens that the template writes: here
    they may stand in what somebody says. Where `random` gives its least numbers, the conversation is the plainest."""
    units = [*PLAIN, *random.choice([(), SPACE, UNICODE, SPACE + UNICODE, SPACE + TAGS, (*SPACE, *TAGS, *markers)])]
    thoughts = random.choice([None, None, None, "reasoning_content", "thinking"])
    prefilled = random.choice(["", "", "", "", "<think>\n</think>"])  # the generation prompt of some that think
    calls = random.random() > 0.6

    def text(most: int = 5) -> str:
        return "".join(random.choice(units) for _ in range(random.randint(0, most)))

    def turn(calling: bool) -> Message:
        message: Message = {"role": "assistant", "content": prefilled + text()}
        if thoughts and random.random() > 0.4:
            message[thoughts] = text()
        if not message["content"].strip() and random.random() < 0.9:  # few blank ones: they are refused
            message["content"] += random.choice(PLAIN)
        if calling:
            message["content"] = random.choice([None, "", text()])
            message["tool_calls"] = [call(random, text) for _ in range(random.choice([1, 1, 1, 2, 3]))]
        return message

    messages: list[Message] = [said("system", text())] if random.random() > 0.7 else []
    for _ in range(random.choice([1, 1, 2, 2, 3, 4])):
        messages.append(said("user", text()))
        for _ in range(random.choice([0, 0, 1, 1, 2]) if calls else 0):
            messages.append(turn(True))
            messages += [
                said("tool", text()) | {"tool_call_id": c["id"], "name": NAMES[0]}
                for c in messages[-1]["tool_calls"]
                if "id" in c
            ]
        messages.append(turn(False))
    if random.random() > 0.85:  # out of order
        for _ in range(random.randint(1, 3)):
            others = [said("tool", text()) | {"tool_call_id": "call00009"}, turn(False), said("developer", text())]
            extra = random.choice([said("user", text()), said("system", text()), *others])
            messages.insert(random.randint(0, len(messages)), extra)
        del messages[random.randrange(len(messages))]
    if random.random() > 0.95:  # as parquet reads them
        messages = [{"reasoning_content": None, "tool_calls": None, "name": None} | m for m in messages]
    tools: list[Any] | None = (
        [schema(name) for name in NAMES[: random.randint(1, 3)]] if calls or random.random() > 0.9 else None
    )
    if tools is None and random.random() > 0.95:
        tools = []  # no context
    arguments = {"enable_thinking": random.random() > 0.5} if random.random() > 0.95 else None
    return Conversation("fuzz", messages, tools, "last" if random.random() > 0.9 else "assistant", arguments)


def call(random: Random, text: Any) -> dict[str, Any]:
    values = {random.choice(["x", "y", "city"]): random.choice([*VALUES, text()]) for _ in range(random.randint(0, 2))}
    function = {"name": random.choice(NAMES), "arguments": json.dumps(values) if random.random() > 0.7 else values}
    return (
        function
        if random.random() > 0.95
        else {"id": f"call{random.randint(0, 99999):05}", "type": "function", "function": function}
    )


def schema(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "string", "description": "What to look for"}},
        "required": ["x"],
    }
    return {"type": "function", "function": {"name": name, "description": f"The tool {name}", "parameters": parameters}}
