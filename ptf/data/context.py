"""A check that a chat template shows the whole context of a response.

The context is the messages of users, systems, developers and tools, and the tools themselves.

A text that is found in the render, and could have come from nowhere else in it, is shown; this costs no render. Texts
that are not found are replaced by unique words in one more render. A part whose word does not appear, and whose
replacement does not change the render, is context that the template drops. Earlier thinking is not context, because
templates drop it on purpose.
"""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from json.encoder import encode_basestring  # a string as JSON
from typing import Any

from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

CERTAIN = 16  # a text of at least so many characters that occurs once in the context is not in a render by chance


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of the context, and how its presence in a render is tested."""

    name: str  # what an error calls it
    content: str
    texts: tuple[str, ...]  # any of these in a render shows the part
    place: tuple[Any, ...]  # the keys that lead to the content in (messages, tools); () where it cannot be replaced
    before: str = ""  # what stays before the content at its place


def raise_if_unseen(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    tokenizer: Tokenizer,
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
    since: int = 0,
    where: str = "",
) -> None:
    """Raise UserError where the render `text` does not show one of the messages or tools.

    `text` is the render of the messages up to the generation prompt. Messages are checked from number `since` on; tools
    are checked where `since` is 0. `where` names the turn whose context it is.
    """
    if tokenizer.rendering.allow_unseen:
        return
    parts = [part for i in range(since, len(messages)) for part in _parts(i, messages[i])]
    parts += [_tool(k, tool) for k, tool in enumerate(tools or ()) if since == 0]
    written = json.dumps(tools, ensure_ascii=False, default=str) if tools else ""
    corpus = "\0".join([*(str(m["content"]) for m in messages), written, str(tokenizer.hf.chat_template)])
    hidden = [part for part in parts if not any(_certain(t, corpus) and t in text for t in part.texts)]
    if not hidden:
        return
    shown = _are_shown(hidden, messages, tools, tokenizer, arguments)
    for part, is_shown in zip(hidden, shown, strict=True):
        if not is_shown and _rendered([part], messages, tools, tokenizer, arguments)[0] == text:
            raise UserError(
                f"chat template {tokenizer.template_name}{where}: it does not show {part.name}, {part.content[:60]!r}; "
                "give model.chat_template a template "
                "that does, or set data.omitted_context: allow to train without what is not shown"
            )


def _certain(text: str, corpus: str) -> bool:
    """Return whether a text in a render cannot have come from another part of the context."""
    return len(text) >= CERTAIN and "<" not in text and corpus.count(text) <= 1


def _are_shown(parts: Sequence[Passage], messages: Any, tools: Any, tokenizer: Tokenizer, arguments: Any) -> list[bool]:
    """Return for each part whether its replacement appears in the render."""
    text, words = _rendered(parts, messages, tools, tokenizer, arguments)
    if text is None and len(parts) > 1:
        return [shown for part in parts for shown in _are_shown([part], messages, tools, tokenizer, arguments)]
    # A template that refuses the word reads the content that the word replaces.
    return [text is None or word in text for word in words]


def _rendered(
    parts: Sequence[Passage], messages: Any, tools: Any, tokenizer: Tokenizer, arguments: Any
) -> tuple[str | None, list[str]]:
    """Return the render with words in place of the parts, or None where the template refuses them, and the words."""
    changed: Any = [list(messages), list(tools or ())]
    words = [f"QX{n}XQ" for n in range(len(parts))]
    for part, word in zip(parts, words, strict=True):
        inside = changed
        for key in part.place[:-1]:  # what leads to the place is copied, what is beside it is not
            inside[key] = copy(inside[key])
            inside = inside[key]
        if part.place:
            inside[part.place[-1]] = part.before + word
    try:
        return tokenizer.render_text(changed[0], True, changed[1] or None, arguments), words
    except UserError:
        return None, words


def _parts(i: int, message: Mapping[str, Any]) -> list[Passage]:
    """Return the parts of a message that the model which answers it should see: its content and its tool calls.

    The content of an assistant's message counts without its thinking, and only where it has no calls.
    """
    calls, content = message.get("tool_calls") or [], message["content"]
    parts: list[Passage] = []
    thought, tag, spoken = content.rpartition("</think>") if message["role"] == "assistant" else ("", "", content)
    if (said := spoken.strip()) and not (calls and message["role"] == "assistant"):
        texts = (said, encode_basestring(said)[1:-1])
        parts.append(Passage(f"message {i} ({message['role']})", said, texts, (0, i, "content"), thought + tag))
    for k, call in enumerate(calls):
        texts = (json.dumps(call.get("function", call).get("arguments"), ensure_ascii=False, default=str),)
        place = (0, i, "tool_calls", k, *_path_of_name(call))
        parts.append(Passage(f"the call of message {i}", call.get("function", call)["name"], texts, place))
    return parts


def _tool(k: int, tool: Any) -> Passage:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    inside = function if isinstance(function, dict) else {}
    written = (json.dumps(value, ensure_ascii=False, default=str) for value in (tool, function))
    texts = (*written, str(inside.get("description") or ""))
    place = (1, k, *_path_of_name(tool)) if isinstance(tool, dict) else ()
    return Passage(f"tool {k}", str(inside.get("name", tool)), texts, place)


def _path_of_name(tool: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that lead to the name of a tool, or of a call of one."""
    return ("function", "name") if isinstance(tool.get("function"), dict) else ("name",)
