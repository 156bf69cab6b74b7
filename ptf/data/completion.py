"""Responses that a chat template would not show after the served prompt (`data.response_rendering: append`).

A server gives the model a prompt and takes what comes back, and no template rewrites that. Some templates open the
thinking in the prompt and then drop it from the turn (R1-distill, QwQ), or show no thinking at all. So the turn is
assembled: the row's thinking between the tags that the prompt opened or the template has, and after it the response
without thinking as the template writes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ptf.data.incremental_encode import common_prefix_length
from ptf.data.messages import THOUGHTS
from ptf.data.tokenizer import Tokenizer

OPENED = re.compile(r"<think>(\s*)\Z")
CLOSED = re.compile(r"</think>\s*\Z")
EMPTY = re.compile(r"\s*(?:<think>\s*)?</think>\s*")  # how templates begin a turn without thinking
INSIDE = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*(.*)", re.DOTALL)  # thinking that stands in the content


def without_thinking(message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the thinking of a turn, stripped, and the turn without it."""
    bare = {key: value for key, value in message.items() if key not in THOUGHTS}
    apart = next((message[key].strip() for key in THOUGHTS if str(message.get(key) or "").strip()), "")
    inside = INSIDE.fullmatch(message["content"])
    if apart or not inside:
        return apart, bare
    return inside[1].strip(), bare | {"content": inside[2]}


def complete_answer(
    before: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    prompt: str,
    tokenizer: Tokenizer,
    tools: Any,
    arguments: Mapping[str, Any],
    fail: Callable[[str], Exception],
) -> tuple[str, str, dict[str, Any] | None]:
    """Return the text that follows the prompt, in two parts: the thinking with its tags, and the response.

    The third value is the message that the response must show; it is None where the response is the content as it
    stands, because the template would not show it. Raises the error that `fail` makes of a reason.
    """
    thought, bare = without_thinking(message)
    opened = OPENED.search(prompt)
    if thought and CLOSED.search(prompt):
        raise fail(
            f"the generation prompt already closes the thinking block, but this turn has thinking {thought[:60]!r}; "
            "switch thinking on in model.template_args (Qwen3: enable_thinking: true)"
        )
    if thought and not opened and "<think>" not in str(tokenizer.hf.chat_template):
        raise fail(
            "it has no tags for thinking; write the thinking into `content`, with its tags, as the model is to "
            "generate it"
        )
    head, start, end = _frame([*before], prompt[: opened.start()] if opened else prompt, tokenizer, tools, arguments)
    answer, shows = "", bare
    if head is not None:
        through = tokenizer.render_text([*before, bare], False, tools, arguments)
        answer = through[len(head) :] if through.startswith(head) else ""
        answer = answer[len(empty[0]) :] if (empty := EMPTY.match(answer)) else answer
    if bare.get("tool_calls"):
        if not answer:
            raise fail(
                "it renders this tool call in a way that does not continue the generation prompt, so a served model "
                "could not produce it; set model.chat_template to a template whose turns begin with that prompt"
            )
    elif bare["content"].strip() not in answer or not answer:
        answer, shows = start + bare["content"] + end, None
    if opened:
        return f"{thought}{opened[1]}</think>{opened[1] * 2}", answer, shows
    return f"<think>\n{thought}\n</think>\n\n" if thought else "", answer, shows


def _frame(
    before: list[Any], prompt: str, tokenizer: Tokenizer, tools: Any, arguments: Mapping[str, Any]
) -> tuple[str | None, str, str]:
    """Return the part of `prompt` that begins the turn, and the text that the template writes around a response.

    `prompt` ends before thinking that it opens. The first value is None where the template shows the earlier messages
    differently; the text around the response then comes from a conversation of one message.
    """
    word = "QX0XQ"
    shown = tokenizer.render_text(before, False, tools, arguments)
    answered = tokenizer.render_text([*before, {"role": "assistant", "content": word}], False, tools, arguments)
    common = prompt[: common_prefix_length(prompt, answered)]
    if prompt.startswith(shown) and len(common) >= len(shown):
        start, _, end = answered[len(common) :].partition(word)
        return common, start[len(empty[0]) :] if (empty := EMPTY.match(start)) else start, end
    question = [{"role": "user", "content": "1"}]
    prompt = tokenizer.render_text(question, True, None, arguments)
    start, _, end = tokenizer.render_text(
        [*question, {"role": "assistant", "content": word}], False, None, arguments
    ).partition(word)
    return None, start[common_prefix_length(prompt, start) :], end
