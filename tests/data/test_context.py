"""Context that a chat template does not show is refused by name, or allowed by a key; what is shown costs no render."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ptf.data import context
from ptf.data.chat import chat_samples
from ptf.data.encode import encode_document, encode_prompt
from ptf.data.rendering import Rendering
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.conversations import said
from tests.data.templates import templated

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks it up",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lookup", "arguments": {"x": 1}}}]}
ASKED = [said("user", "What is the weather like in Denver?"), said("assistant", "It is sunny today.")]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "what"),
    [
        ("drops_tools", ASKED, TOOLS, "tool 0, 'lookup'"),
        (
            "drops_results",
            [said("user", "a"), CALL, said("tool", "b"), said("assistant", "c")],
            TOOLS,
            "message 2 (tool), 'b'",
        ),
        ("first_system_only", [said("system", "a"), said("system", "b"), *ASKED], None, "message 1 (system), 'b'"),
        ("first_system_only", [said("developer", "be brief"), *ASKED], None, "message 0 (developer), 'be brief'"),
        (
            "first_system_only",
            [said("user", "a b"), said("developer", "a"), said("assistant", "c")],
            None,
            "message 1 (developer), 'a'",
        ),  # 'a' stands elsewhere
    ],
)
def test_what_a_template_drops_is_named(template: str, messages: list[dict[str, Any]], tools: Any, what: str) -> None:
    tokenizer = templated(template)
    with pytest.raises(UserError) as error:
        chat_samples(messages, tokenizer, tools=tools, train_on="last")
    assert f"chat template {tokenizer.template_name}, turn {len(messages) - 1}: it does not show {what}" in str(
        error.value
    )
    assert "model.chat_template" in str(error.value)
    assert "data.omitted_context: allow" in str(error.value)
    allowing = Tokenizer(tokenizer.hf)
    allowing.rendering = Rendering(allow_unseen=True)
    assert chat_samples(messages, allowing, tools=tools, train_on="last")


def test_a_prompt_without_its_tools_is_refused_too() -> None:
    for tools in (None, [], TOOLS):
        row = {"messages": ASKED[:1], "tools": tools}
        if tools:
            with pytest.raises(UserError, match="it does not show tool 0, 'lookup'"):
                encode_prompt(row, templated("drops_tools"), "a", 0)
        else:
            encode_prompt(row, templated("drops_tools"), "a", 0)
    encode_prompt({"messages": ASKED[:1], "tools": TOOLS}, templated("plain"), "a", 0)


@pytest.mark.parametrize("template", ["plain", "drops_thinking", "developer", "next_role_stop", "two_stops", "date"])
def test_what_is_shown_in_other_words_is_shown(template: str) -> None:
    """JSON text, names alone, earlier thinking that is dropped."""
    messages = [
        said("user", "hm"),
        {**CALL, "reasoning_content": "I ponder"},
        said("tool", 'a "b"\n'),
        said("assistant", "<think>so</think>c"),
        said("user", "d"),
        said("assistant", "e"),
    ]
    assert chat_samples(messages, templated(template), tools=TOOLS, train_on="last")


def test_what_is_there_to_see_costs_no_render(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two renders a turn, with and without the check; one more a turn where the words alone do not tell."""
    tokenizer, renders = templated("plain"), []
    render = tokenizer.hf.apply_chat_template
    monkeypatch.setattr(
        tokenizer.hf, "apply_chat_template", lambda *args, **kwargs: renders.append(1) or render(*args, **kwargs)
    )

    def counted(messages: list[dict[str, Any]], **changes: Any) -> int:
        renders.clear()
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "rendering", replace(tokenizer.rendering, **changes))
            chat_samples(messages, tokenizer, tools=TOOLS)
        return len(renders)

    long = [*ASKED, said("user", "And what will it be like tomorrow?"), said("assistant", "It will rain, I am afraid.")]
    short = [*ASKED, said("user", "Why?"), said("assistant", "I do not know.")]
    counted(long)  # a template that no test of this process has used is probed first
    assert counted(long) == counted(long, allow_unseen=True) == 4
    assert counted(short) == counted(short, allow_unseen=True) + 1


def test_the_arguments_of_a_row_are_its_own() -> None:
    """They reach the template, come before the config's, and change what is trained behind; nulls are none."""
    tokenizer = templated("thinking_switch")
    chat = {"messages": ASKED}

    def trained(row: dict[str, Any]) -> str:
        (unit,) = encode_document(row, tokenizer)
        return tokenizer.decode(unit[0].tokens)

    with pytest.raises(
        UserError,
        match=r"never served.*model\.chat_template.* model\.template_args .* data\.response_rendering: append",
    ):
        trained(chat)
    for key in ("template_args", "chat_template_kwargs"):
        assert trained({**chat, key: {"enable_thinking": False, "other": None}}).endswith(
            "<think></think>It is sunny today.<|im_end|>"
        )
    prompt = encode_prompt({"messages": ASKED[:1], "template_args": {"enable_thinking": False}}, tokenizer, "a", 0)
    assert tokenizer.decode(prompt.tokens).endswith("<think></think>")
    assert trained({**chat, "template_args": '{"enable_thinking": false}'}).endswith("sunny today.<|im_end|>")
    off = templated("thinking_switch, enable_thinking: false")
    with pytest.raises(UserError, match="never served"):
        encode_document({**chat, "template_args": {"enable_thinking": True}}, off)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"template_args": {"a": 1}, "chat_template_kwargs": {"a": 1}},
            "both `template_args` and `chat_template_kwargs`",
        ),
        ({"template_args": [1]}, "`template_args` must be an object"),
        ({"template_args": "x"}, "`template_args` must be an object"),
        ({"template_args": {"messages": []}}, "'messages' cannot be an argument of a chat template"),
    ],
)
def test_bad_arguments_of_a_row_are_refused(characters: Tokenizer, row: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        encode_document({"messages": [said("user", "a"), said("assistant", "b")], **row}, characters)


def test_a_text_is_certain_from_sixteen_characters_on():
    assert context._certain("0123456789abcdef", "0123456789abcdef and more")
    assert not context._certain("0123456789abcde", "0123456789abcdef and more")
    assert not context._certain("0123456789<bcdef", "0123456789<bcdef")
    assert not context._certain("0123456789abcdef", "0123456789abcdef 0123456789abcdef")


@pytest.mark.parametrize(
    ("tool", "renamed"),
    [
        (
            {"type": "function", "function": {"name": "a", "x": 1}},
            {"type": "function", "function": {"name": "b", "x": 1}},
        ),
        ({"name": "a", "x": 1}, {"name": "b", "x": 1}),
        ({"function": "a"}, {"function": "a", "name": "b"}),
        ("a", "a"),
        (None, None),
    ],
)
def test_a_tool_gets_another_name_if_it_has_one(tool, renamed):
    before = repr(tool)
    rendered: Any = SimpleNamespace(render_text=lambda messages, prompt, tools, arguments: json.dumps(tools[0]))
    text, (word,) = context._rendered([context._tool(0, tool)], [], [tool], rendered, None)
    assert json.loads(str(text).replace(word, "b")) == renamed
    assert repr(tool) == before
