"""What of a conversation is trained, and what is refused; its masks are compared with an oracle's in test_oracle.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptf.data.chat import chat_samples
from ptf.data.rendering import Rendering
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.templates import templated


def numbered(texts: list[str], roles: list[str]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": f"Nr{i}. {text} Rn{i}."}
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def test_a_turn_that_is_never_served_is_refused() -> None:
    tokenizer = templated("thinking_opened")
    with pytest.raises(
        UserError, match=f"chat template {tokenizer.template_name}, turn 1: the generation prompt ends in '<think>"
    ):
        chat_samples(numbered(["a", "b"], ["user", "assistant"]), tokenizer)


def calling(content: str, *names: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call0000{k}", "type": "function", "function": {"name": name, "arguments": {"x": k}}}
        for k, name in enumerate(names)
    ]
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": calls}]


@pytest.mark.parametrize(
    ("template", "messages", "part"),
    [
        ("drops_tools", calling("I lookup that.", "lookup"), "lookup"),
        ("end_of_document", calling("", "end"), "end"),  # as in <|end|>
        ("return_or_end", calling("", "lookup", "lookup"), "lookup"),  # shows one call a turn
        ("moving_tools", calling("look", "lookup"), "look"),  # shows a call or what was said, not both
        (
            "plain",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b, so c", "reasoning_content": "b"}],
            "b",
        ),
        (
            "plain",
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>", "reasoning_content": "<think>"},
            ],
            "<think>",
        ),
        (
            "drops_thinking",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<think>c</think>d"}],
            "b",
        ),
        (
            "drops_thinking",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c</think>d"}],
            "c",
        ),
    ],
)
def test_a_part_that_only_seems_to_be_there_is_refused(
    template: str, messages: list[dict[str, Any]], part: str
) -> None:
    """What a template drops may stand in something else that it shows, or in its own markers."""
    with pytest.raises(UserError, match=f"turn 1: the template leaves out '{part}'"):
        chat_samples(messages, templated(template))


def test_thinking_inside_the_content_may_be_laid_out_anew() -> None:
    tokenizer = templated("drops_thinking")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    (sample,) = chat_samples(messages, tokenizer)
    assert tokenizer.decode(sample.tokens[sample.loss_weights > 0]) == "<think>\nb\n</think>\n\nc<|im_end|>"


def test_a_refusing_template_names_the_turn() -> None:
    tokenizer = templated("no_system")
    tokenizer.rendering = Rendering(consecutive="keep")
    messages = numbered(["a", "b", "c", "d"], ["user", "assistant", "assistant", "user"])
    with pytest.raises(
        UserError, match=f"turn 2: chat template {tokenizer.template_name} refuses the messages: roles must alternate"
    ):
        chat_samples(messages, tokenizer)


@pytest.mark.parametrize(
    "template", ["return_or_end", "plain", "drops_thinking", "next_role_stop", "moving_tools", "two_stops"]
)
def test_tool_calls_are_trained_and_their_results_are_not(template: str) -> None:
    tokenizer = templated(template)
    call = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"x": "Denver"}'}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '"sunny"', "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It shines."},
    ]
    samples = chat_samples(messages, tokenizer)
    said = "".join(tokenizer.decode(s.tokens[s.loss_weights > 0]) for s in samples)
    assert said.count("lookup") == said.count("Denver") == said.count("It shines.") == 1
    assert "sunny" not in said
    stops = [
        s.tokens[i]
        for s in samples
        for i in np.flatnonzero((s.loss_weights > 0) & ~(np.append(s.loss_weights[1:], 0) > 0))
    ]
    assert len(stops) == 2
    assert set(stops) <= set(tokenizer.stop_ids)


def test_thinking_is_trained_where_the_template_shows_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "ponder"}]
    (sample,) = chat_samples(messages, templated("drops_thinking"))
    assert (
        templated("drops_thinking").decode(sample.tokens[sample.loss_weights > 0])
        == "<think>\nponder\n</think>\n\nb<|im_end|>"
    )
    with pytest.raises(UserError, match="leaves out 'ponder'"):
        chat_samples(messages, templated("plain"))


def test_a_token_over_the_end_of_the_prompt_is_cut_as_a_server_cuts_it() -> None:
    """The prompt ends in "\\n\\n", which is one token where nothing follows: rendered as one text,
    its end would be other ids than are served."""
    tokenizer = templated("drops_thinking, enable_thinking: false")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    (sample,) = chat_samples(messages, tokenizer)
    prompt = tokenizer.render(messages[:1], True)
    assert sample.tokens[: len(prompt)].tolist() == prompt != tokenizer.render(messages, False)[: len(prompt)]
    assert sample.loss_weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(sample) - len(prompt))
    assert tokenizer.decode(sample.tokens[len(prompt) :]) == "yes<|im_end|>"


USER, CALL = {"role": "user", "content": "a"}, {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a list of messages, and not empty"),
        ("hello", "must be a list of messages"),
        ([{"content": "a"}], "message 0 must be an object with a `role`"),
        ([USER], "no assistant turn"),
        ([{"role": "user", "content": None}], "message 0 .user.: `content` must be a string"),
        ([USER, {"role": "assistant", "content": ["b"]}], "message 1 .assistant.: `content` must be a string"),
        ([{"role": "assistant", "content": "a"}], "turn 0: the assistant speaks first"),
        (
            [USER, {"role": "assistant", "content": "b<|im_end|>c"}],
            "turn 1: the end-of-turn token '<|im_end|>' stands inside",
        ),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
            "message 1: the arguments of f are not JSON that can be read",
        ),
    ],
)
def test_bad_conversations_are_refused(characters: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        chat_samples(messages, characters)


def test_a_template_without_an_end_of_turn_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    endless = Tokenizer.load(str(tmp_path))
    endless.hf.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}{{ 'assistant ' if "
        "add_generation_prompt }}"
    )
    with pytest.raises(UserError, match=r"turn 1: no end-of-turn token; known ones are \['<\|im_end\|>'\]"):
        chat_samples([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], endless)


def test_a_full_mask_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    bare = Tokenizer.load(str(tmp_path))
    bare.hf.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    bare.rendering = Rendering(allow_unseen=True)
    with pytest.raises(UserError, match="turn 1: nothing comes before the response"):
        chat_samples([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], bare)
