"""What an answer follows: the conversation that a row's prompt, or its messages, and the answer make.

The one idea: an answer in which the user speaks is the conversation already, so nothing is put before it; what the row says beside it must agree.
"""

from collections.abc import Sequence
from typing import Any

from ptf.data.chat import clean
from ptf.data.forms import COLUMNS, Row
from ptf.errors import UserError


def history_of(row: Row) -> Any:
    """What a row's answer follows: its `messages`, but for those that end with the assistant's, which are a whole conversation; or its `prompt`. None
    where it has neither. Raises UserError where it has both, and they differ."""
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is None or (isinstance(messages, list) and messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"):
        return prompt
    if prompt is not None and not _begins(messages, prompt):
        raise UserError(f"`messages` do not begin with `prompt`, so either could be the prompt; {COLUMNS}: {{prompt: null}} or {{messages: null}} decides")
    return messages


def conversation(history: Any, answer: Any, name: str) -> list[Any]:
    """Messages of a prompt and the answer to it, of which the assistant's are last. An answer in which the user speaks is the conversation: the history
    that it begins with is not put before it, and another one is refused."""
    said = {str: lambda: [{"role": "assistant", "content": answer}], dict: lambda: [answer], list: lambda: answer}.get(type(answer))
    if said is None or (history is None and not isinstance(answer, list)):
        raise UserError(f"an answer must be a string or messages, and without a prompt it must be messages; this one is {str(answer)[:60]!r}")
    messages = said() if is_conversation(answer) else [*as_history(history), *said()]
    if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
        raise UserError("an answer must end with a message of the assistant's")
    if history is not None and is_conversation(answer) and not _begins(messages, history):
        raise UserError(
            f"`{name}` is a whole conversation, but it does not begin with the row's prompt; {COLUMNS}: {{prompt: null}} (or {{messages: null}}) trains "
            f"`{name}` as it stands"
        )
    return messages


def as_history(history: Any) -> list[Any]:
    if isinstance(history, str):
        return [{"role": "user", "content": history}]
    if history is not None and not isinstance(history, list):
        raise UserError(f"a prompt must be a string or a list of messages, not {type(history).__name__}")
    return history or []


def differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two conversations answer different prompts: all up to the last thing that the user said."""
    return not _same(_asked(clean(list(one))), _asked(clean(list(other))))


def _asked(messages: Sequence[Any]) -> Sequence[Any]:
    """All up to the last thing that the user said."""
    return messages[: max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1) + 1]


def _same(ours: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether two lists of messages, both `clean`, say the same."""
    says = [[(m["role"], m["content"].strip(), m.get("tool_calls")) for m in messages] for messages in (ours, others)]
    return says[0] == says[1]


def is_conversation(answer: Any) -> bool:
    return isinstance(answer, list) and any(isinstance(m, dict) and m.get("role") == "user" for m in answer)


def _begins(messages: list[Any], history: Any) -> bool:
    """Whether messages begin with a history, which may leave out their system message."""
    whole, before = clean(messages), clean(as_history(history))
    unled = whole[1:] if whole[0]["role"] == "system" and before[0]["role"] != "system" else whole
    return _same(unled[: len(before)], before)
