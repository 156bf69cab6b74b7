"""Formats by name."""

import json
from dataclasses import FrozenInstanceError

import pytest

from ptf.data.tool_calls import FORMATS, ToolCall, parser
from ptf.errors import UserError
from tests.data.tool_calls.sampled_texts import sampled


def test_an_unknown_name_is_refused_with_the_nearest():
    assert parser("hermes") is FORMATS["hermes"]  # the control
    with pytest.raises(UserError, match=r"'qwen_coder'; there are hermes, .*\(did you mean qwen3_coder\?\)"):
        parser("qwen_coder")
    with pytest.raises(UserError, match=r"'zzz'; there are hermes, qwen3_coder"):
        parser("zzz")


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_json_and_a_text_without_calls_is_its_content(name):
    with_calls = 0
    for seed in range(500):
        text, tools, _ = sampled(name, seed)
        answer = parser(name).parse(text, tools)
        for call in answer.tool_calls:
            assert call.name
            json.dumps(json.loads(call.arguments), allow_nan=False)
            call.arguments.encode()
        if answer.tool_calls:
            with_calls += 1
        elif "<|python_" not in text and name != "harmony":
            assert (answer.content or "") == text
    assert 100 < with_calls < 500  # the control: texts of both kinds


def test_calls_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        ToolCall("f", "{}").name = "g"  # pyright: ignore[reportAttributeAccessIssue]
