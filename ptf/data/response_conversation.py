"""The conversation of a response: what a row's prompt, or its messages, and the response make together.

A response that has a user's turn is the whole conversation already, so nothing is put before it, and the row's prompt
must agree with it.
"""

from collections.abc import Sequence
from typing import Any

from ptf.data.chat import clean
from ptf.data.forms import COLUMNS, Row
from ptf.errors import UserError


def history_of(row: Row) -> Any:
    """Return what a row's response follows: its `messages` or its `prompt`, or None where it has neither.

    `messages` that end with the assistant's are a whole conversation and do not count. Raises UserError where a row has
    both and they differ.
    """
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is None or (
        isinstance(messages, list)
        and messages
        and isinstance(messages[-1], dict)
        and messages[-1].get("role") == "assistant"
    ):
        return prompt
    if prompt is not None and not _begins(messages, prompt):
        raise UserError(
            f"`messages` do not begin with `prompt`, so either could be the prompt; {COLUMNS}: {{prompt: "
            "null} or {messages: null} decides"
        )
    return messages


def join_answer(history: Any, answer: Any, name: str) -> list[Any]:
    """Return the messages of a prompt and the response to it, which end with the assistant's.

    A response that has a user's turn is the whole conversation: the history that it begins with is not put before it,
    and another history is refused. Raises UserError for any other form of response.
    """
    if isinstance(answer, str):
        tail = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, dict):
        tail = [answer]
    else:
        tail = answer if isinstance(answer, list) else None
    if tail is None or (history is None and not isinstance(answer, list)):
        raise UserError(
            "a response must be a string or messages, and without a prompt it must be messages; "
            f"this one is {str(answer)[:60]!r}"
        )
    messages = tail if is_conversation(answer) else [*as_history(history), *tail]
    if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
        raise UserError("a response must end with a message of the assistant's")
    if history is not None and is_conversation(answer) and not _begins(messages, history):
        raise UserError(
            f"`{name}` is a whole conversation, but it does not begin with the row's prompt; {COLUMNS}: {{prompt: "
            "null} (or {messages: null}) trains "
            f"`{name}` as it stands"
        )
    return messages


def as_history(history: Any) -> list[Any]:
    """Return a prompt, which is a string or a list of messages, as messages."""
    if isinstance(history, str):
        return [{"role": "user", "content": history}]
    if history is not None and not isinstance(history, list):
        raise UserError(f"a prompt must be a string or a list of messages, not {type(history).__name__}")
    return history or []


def differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two conversations answer different prompts: all messages up to the last one of the user."""
    prompts = (
        messages[: max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1) + 1]
        for messages in (clean(list(one)), clean(list(other)))
    )
    return not _same(*prompts)


def _same(ours: Sequence[Row], others: Sequence[Row]) -> bool:
    contents = [
        [(m["role"], m["content"].strip(), m.get("tool_calls")) for m in messages] for messages in (ours, others)
    ]
    return contents[0] == contents[1]


def is_conversation(answer: Any) -> bool:
    """Return whether a response holds a message of the user, and so is a whole conversation."""
    return isinstance(answer, list) and any(isinstance(m, dict) and m.get("role") == "user" for m in answer)


def _begins(messages: list[Any], history: Any) -> bool:
    """Return whether messages begin with a history, which may leave out their system message."""
    whole, before = clean(messages), clean(as_history(history))
    comparable = whole[1:] if whole[0]["role"] == "system" and before[0]["role"] != "system" else whole
    return _same(comparable[: len(before)], before)
