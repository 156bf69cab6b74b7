"""The calculator (`ptf.tasks.tool_calculator`) for an agent of smolagents, which runs in an interpreter of its own.

The agent is the library's `ToolCallingAgent` with a short system prompt. It writes calls into its messages in its own
words, so the second request of an episode begins a new training sample.
"""

import functools
import json
import random
from pathlib import Path

SYSTEM = "Call add. Then give its result as the final answer."
LAST = "Give the final answer."
TEMPLATES = {
    "system_prompt": SYSTEM,
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": LAST, "post_messages": ""},
}
ADD = "Add two digits and a third one."
ANSWER = "Provides a final answer to the given problem."


def agent(row, base_url, api_key, seed, shuffled=False):
    """Play one episode, and return its reward in [0, 1]: 1/4 for each right number of the first call, 1/2 if the
    agent returns the result of that call.

    With `shuffled`, other digits are right: a control, from which nothing can be learned.
    """
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent

    generator = random.Random(seed)
    third = generator.randrange(10)
    task = row["messages"][-1]["content"]
    wanted = [int(digit) for digit in task.split("+")]
    add = adder()(third)
    shared = {"http_client": http_client()}
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs=shared, tool_choice="auto")
    player = ToolCallingAgent([add], model, TEMPLATES, max_steps=2, verbosity_level=LogLevel.OFF)
    answer = player.run(task)
    if not add.calls:
        return 0.0
    call, result = add.calls[0]
    if shuffled:
        wanted, result = [generator.randrange(10), generator.randrange(10)], generator.randrange(10)
    right = sum(a == b for a, b in zip(call, wanted, strict=True))
    return 0.25 * right + 0.5 * (str(answer) == str(result))


@functools.cache
def http_client():
    """Return the connections of all episodes: to make them takes longer than an episode."""
    from openai import DefaultHttpxClient

    return DefaultHttpxClient()


@functools.cache
def adder():
    """Return the class of the tool `add`, which keeps its calls with their results."""
    from smolagents import Tool

    class Add(Tool):
        name, description, output_type = "add", ADD, "integer"
        inputs = {part: {"type": "integer", "description": "a digit"} for part in ("a", "b")}

        def __init__(self, third):
            super().__init__()
            self.third, self.calls = third, []

        def forward(self, a: int, b: int) -> int:
            result = (a + b + self.third) % 10
            self.calls.append(((a, b), result))
            return result

    return Add


def prepare(directory: str) -> None:
    """Write `train.jsonl` and `test.jsonl`, the responses of `calls.jsonl` for SFT, and `model/`."""
    from ptf.tasks.tiny import write_model
    from ptf.tasks.tool_calculator import TEMPLATE, sums, write_sums

    root, generator = Path(directory), random.Random("calls")
    write_sums(root)
    tools = [function("add", ADD, ["a", "b"], "integer"), function("final_answer", ANSWER, ["answer"], "any")]
    rows = []
    for a, b in sums()[:80]:
        for result in range(10):
            first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"New task:\n{a}+{b}"}]
            name = "".join(generator.choices("0123456789abcdef", k=9))
            said = f"{CALLING}{name}{CALLED}{a}, 'b': {b}}}}}}}]"
            second = [{"role": "assistant", "content": said}, {"role": "user", "content": f"Observation:\n{result}"}]
            for prompt, call in (
                (first, {"name": "add", "arguments": {"a": a, "b": b}}),
                (first + second, {"name": "final_answer", "arguments": {"answer": str(result)}}),
            ):
                answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
                rows.append({"prompt": prompt, "completion": [answer], "tools": tools})
    (root / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(
        root / "model",
        "\n" + "".join(map(chr, range(32, 127))),
        dim=64,
        layers=2,
        max_length=512,
        template=TEMPLATE,
        words=WORDS,
    )


CALLING = "Calling tools:\n[{'id': '"
CALLED = "', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': "
WORDS = [  # single tokens, as frequent parts are in the vocabulary of a large model
    *("<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": ', ', "b": ', "}}"),
    *('{"name": "final_answer", "arguments": {"answer": "', '"}}', CALLING, CALLED, ", 'b': ", "}}}]"),
    *("New task:\n", "Observation:\n", SYSTEM, LAST, ADD, ANSWER),
]


def function(name, description, arguments, kind):
    """Return a tool as the library describes it."""
    parameters = {"type": "object", "properties": {a: {"type": kind} for a in arguments}, "required": arguments}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
