"""Calls that published templates render are found in the text again, with the format found in the template."""

import json
from typing import Any

import pytest

from ptf.data.tool_calls import format_of, parser
from tests.data.tool_calls.tables import TOOLS, tool

CALLS = [
    ("f", {"n": 1, "x": 2.5, "s": 'a "b"\n\\ <c> {d} é東', "b": True}),
    ("g", {"items": [1, {"k": None}], "o": {"p": ["q"]}}),
    ("f", {"s": "5"}),
    ("now", {}),
]
TOOLS_OF_CALLS = [*TOOLS, tool("g", items={"type": "array"}, o={"type": "object"}), tool("now")]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversations: list[Any] = [messages]
    tools: list[Any] = TOOLS_OF_CALLS
    return render_jinja_template(conversations, tools=tools, chat_template=template, bos_token="<s>", eos_token="</s>")[
        0
    ][0]


@pytest.mark.parametrize(
    ("file", "start", "end"),
    [
        ("qwen2.5", "<|im_start|>assistant\n", "<|im_end|>"),
        ("qwen3", "<|im_start|>assistant\n", "<|im_end|>"),
        ("qwen3-instruct-2507", "<|im_start|>assistant\n", "<|im_end|>"),
        ("qwq-32b", "<|im_start|>assistant\n", "<|im_end|>"),
        ("minimind", "<|im_start|>assistant\n", "<|im_end|>"),
        ("qwen3-coder", "<|im_start|>assistant\n", "<|im_end|>"),
        ("qwen3.5-think", "<|im_start|>assistant\n", "<|im_end|>"),
        ("mistral-nemo", "[/INST]", "</s>"),
    ],
)
def test_published_templates(shared, file, start, end):
    template = (shared / f"templates/{file}.jinja").read_text()
    calls = [
        {"id": f"Ab3dE6gh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(CALLS)
    ]
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = rendered(template, messages).rpartition(start)[2].rpartition(end)[0]
    name = format_of(template)
    assert name is not None
    found = parser(name).parse(text, TOOLS_OF_CALLS).tool_calls
    assert [(call.name, json.loads(call.arguments)) for call in found] == CALLS
