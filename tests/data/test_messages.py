"""Texts of columns that become numbers, roles by other names, and two messages of one speaker in a row."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptf.data.chat import chat_samples, in_turns
from ptf.data.messages import CALLS, ROLES, as_number, normalize_messages
from ptf.data.rendering import Rendering
from ptf.errors import UserError
from tests.data import read_form

ASK = {"role": "user", "content": "q"}
CALL = {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (" TRUE ", True),
        ("false", False),
        ("-7", -7),
        ("1e3", 1000.0),
        ("x", "x"),
        ("9" * 19, int("9" * 19)),  # exact, where a float is not
        ("9" * 20, 1e20),  # not an integer without bounds
    ],
)
def test_a_text_is_read_as_the_number_that_it_holds(text, value):
    found = as_number(text)
    assert (found, type(found)) == (value, type(value))


def said(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_read_as_the_sender_of_that_name(role: str) -> None:
    content = json.dumps(CALL) if role in CALLS else "text"
    ours = normalize_messages([ASK, said(role, content)], "messages")
    assert ours == normalize_messages([ASK, {"from": role, "value": content}], "messages")
    assert ours[1]["role"] in ("system", "user", "assistant", "tool")
    assert ours[1].get("tool_calls") == ([CALL] if role in CALLS else None)
    assert normalize_messages([said("critic", "a")], "messages") == [said("critic", "a")], "a template may know it"


@pytest.mark.parametrize("role", CALLS)
def test_calls_that_are_messages_belong_to_the_turn_before_them(role: str) -> None:
    text, call = said("assistant", "wait", thinking="t"), said(role, json.dumps(CALL))
    result = said("observation", "1")
    messages = normalize_messages([ASK, text, call, said(role, CALL), result, call], "messages")
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1] == text | {"tool_calls": [CALL, CALL]}
    assert messages[3]["tool_calls"] == [CALL]
    untrained = normalize_messages([ASK, text, call | {"loss": False}], "messages")
    assert len(untrained) == 3, "what counts otherwise is not joined"
    assert normalize_messages([ASK, text | {"loss": True}, call], "messages")[1:] == [
        text | {"loss": True, "tool_calls": [CALL]}
    ]


def test_a_function_call_of_a_message_is_its_tool_call() -> None:
    old = said("assistant", None, function_call={"name": "f", "arguments": '{"x": 1}'})
    assert normalize_messages([ASK, old], "messages")[1] == said("assistant", "", tool_calls=[CALL])


def test_two_turns_in_a_row_are_refused_joined_or_kept(tmp_path: Path) -> None:
    characters = read_form.tokenizer(tmp_path)
    messages = [ASK, said("assistant", "a b"), said("assistant", "c")]
    with pytest.raises(UserError, match=r"messages 1 and 2 .* data\.consecutive_turns: join .* keep"):
        chat_samples(messages, characters)
    texts = {}
    for way in ("join", "keep"):
        characters.rendering = Rendering(consecutive=way)
        (sample,) = chat_samples(messages, characters)
        texts[way] = characters.decode(sample.tokens[sample.loss_weights > 0])
    characters.rendering = Rendering(consecutive="join")
    assert texts == {"join": "a b\n\nc<|im_end|>", "keep": "a b<|im_end|>c<|im_end|>"}
    assert in_turns([*messages[:2], said("assistant", "", tool_calls=[CALL])], characters)[1:] == [
        said("assistant", "a b", tool_calls=[CALL])
    ]
    called = said("assistant", "", tool_calls=[CALL])
    for second in (
        said("assistant", "c", thinking="t"),
        said("assistant", "<think>t</think>c"),
        said("assistant", "c", loss=False),
    ):
        with pytest.raises(UserError, match="cannot be joined"):
            in_turns([*messages[:2], second], characters)
    with pytest.raises(UserError, match="cannot be joined"):
        in_turns([ASK, called, messages[2]], characters)
