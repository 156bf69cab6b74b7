"""An agent written with OpenAI's SDK, as a team would have it already: it streams, and gives the model a tool.

The task is that of `ptf.tasks.calculator`: the agent gets a sum of two digits, calls the tool `add`, which adds a third
digit that is random in every episode, and answers with the last digit of the total.
"""

import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.tasks.tiny import write_model, write_rows

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|><|system|>' }}{% for tool in tools %}{{ tool.function.name + ' ' + "
    "tool.function.description }}{% endfor %}{{ '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + ({'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)

# single tokens, as the frequent parts of a call are in the vocabulary of a large model
WORDS = ["<tool_call>", '{"name": "add", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>", "add adds"]


def agent(row: Mapping[str, Any], base_url: str, api_key: str, seed: int, *, shuffled: bool = False) -> float:
    """Play one episode, and return its reward in [0, 1]: 1/2 for the right call, 1/2 for the right answer.

    One right number of two gets 1/4, and a response that begins with the result 3/8.
    With `shuffled`, right is what another seed would make right: a control, from which nothing can be learned.
    """
    client = first_client().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = list(row["messages"])
    wanted = [int(digit) for digit in messages[-1]["content"].split("+")]
    generator = random.Random(seed)
    third = generator.randrange(10)
    if shuffled:
        wanted = [generator.randrange(10), generator.randrange(10)]
    content, calls = ask(client, messages)
    if not calls:
        return 0.0
    try:
        numbers = json.loads(calls[0]["function"]["arguments"])
        right = sum(a == b for a, b in zip((numbers["a"], numbers["b"]), wanted, strict=True))
    except (ValueError, TypeError, KeyError):
        return 0.0
    reward = 0.25 * right * (calls[0]["function"]["name"] == "add")
    if reward < 0.5:
        return reward
    result = str((sum(wanted) + third) % 10)
    messages += [
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": result, "tool_call_id": calls[0]["id"]},
    ]
    answer, _ = ask(client, messages)
    return reward + (0.5 if answer == result else 0.375 if answer.startswith(result) else 0.0)


@functools.cache
def first_client() -> Any:
    """Return a client for others to be made from: one by itself takes much longer to make."""
    from openai import OpenAI  # no dependency of ptf: pip install openai

    return OpenAI(api_key="of each episode")


def ask(client: Any, messages: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the tool calls of a streamed response."""
    content, calls = "", dict[int, dict[str, Any]]()
    stream = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], stream=True)
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {}})
                for name, text in (("name", part.function.name), ("arguments", part.function.arguments)):
                    call["function"][name] = call["function"].get(name, "") + (text or "")
    return content, [calls[i] for i in sorted(calls)]


def sums() -> list[tuple[int, int]]:
    """Return all sums of two digits, in an order that is always the same; the first 80 are for training."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random("calculator").shuffle(pairs)
    return pairs


def write_sums(root: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`: prompts, 80 and 20 of the hundred sums."""
    for name, part in (("train", sums()[:80]), ("test", sums()[80:])):
        write_rows(root / f"{name}.jsonl", [{"messages": [{"role": "user", "content": f"{a}+{b}"}]} for a, b in part])


def prepare(directory: str) -> None:
    """Write the prompts, `calls.jsonl` (dialogues with the tool, for SFT) and `model/`."""
    root = Path(directory)
    write_sums(root)
    dialogues = [{"messages": dialogue(a, b, str(d)), "tools": [ADD]} for a, b in sums()[:80] for d in range(10)]
    write_rows(root / "calls.jsonl", dialogues)
    alphabet = "".join(map(chr, range(32, 127)))
    write_model(root / "model", alphabet, dim=64, layers=2, template=TEMPLATE, words=WORDS)


def dialogue(a: int, b: int, result: str) -> list[dict[str, Any]]:
    """Return the messages of an episode in which all is right."""
    function = {"name": "add", "arguments": {"a": a, "b": b}}
    return [
        {"role": "user", "content": f"{a}+{b}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": result, "tool_call_id": "a"},
        {"role": "assistant", "content": result},
    ]
