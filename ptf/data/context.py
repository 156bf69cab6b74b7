"""Whether a chat template shows the context of an answer: what users, systems, developers and tools said, and the tools themselves.

The one idea: a text that is found in the render, and could have come from nowhere else, is shown; this costs no render. For what is not found, all of it
is replaced by words of our own in one more render; what then does not come out, and makes no difference to the render, is context that is dropped.
Earlier thinking is no context: templates drop it on purpose.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

CERTAIN = 16  # characters from which a text that is found once in the context is not found in a render by chance

Conversation = tuple[list[dict[str, Any]], list[Any]]  # messages, tools


@dataclass(frozen=True, slots=True)
class Part:
    """Something that was said: what an error calls it, texts of which each shows it, and how to say a word in its place."""

    name: str
    said: str
    texts: tuple[str, ...]
    replace: Callable[[Conversation, str], None]


def refuse_unseen(
    messages: Sequence[Mapping[str, Any]], text: str, tokenizer: Tokenizer, tools: Any = None, arguments: Mapping[str, Any] | None = None,
    since: int = 0, where: str = "",
) -> None:  # fmt: skip
    """Raises UserError where `text`, the render of the messages up to the generation prompt, does not show one of those from number `since` on, or, from
    0, a tool. `where` names the turn whose context it is."""
    if tokenizer.rendering.allow_unseen:
        return
    parts = [part for i in range(since, len(messages)) for part in _parts(i, messages[i])]
    parts += [_tool(k, tool) for k, tool in enumerate(tools or ()) if since == 0]
    corpus = "\0".join([*(str(m["content"]) for m in messages), json.dumps(tools, ensure_ascii=False, default=str), str(tokenizer.hf.chat_template)])
    hidden = [part for part in parts if not any(_certain(t, corpus) and t in text for t in part.texts)]
    if not hidden:
        return
    shown = _words_shown(hidden, messages, tools, tokenizer, arguments)
    for part, came_out in zip(hidden, shown, strict=True):
        if not came_out and _rendered([part], messages, tools, tokenizer, arguments)[0] == text:
            raise UserError(
                f"chat template {tokenizer.template_name}{where}: it does not show {part.name}, {part.said[:60]!r}; give model.chat_template a template "
                "that does, or set data.unseen_context: allow to train without what is not shown"
            )


def _certain(text: str, corpus: str) -> bool:
    return len(text) >= CERTAIN and "<" not in text and corpus.count(text) <= 1


def _words_shown(parts: Sequence[Part], messages: Any, tools: Any, tokenizer: Tokenizer, arguments: Any) -> list[bool]:
    text, words = _rendered(parts, messages, tools, tokenizer, arguments)
    if text is None and len(parts) > 1:
        return [shown for part in parts for shown in _words_shown([part], messages, tools, tokenizer, arguments)]
    return [text is None or word in text for word in words]  # a template that refuses the word reads what it stands for


def _rendered(parts: Sequence[Part], messages: Any, tools: Any, tokenizer: Tokenizer, arguments: Any) -> tuple[str | None, list[str]]:
    """The render with words in place of the parts, None where the template refuses them, and the words."""
    changed: Conversation = ([dict(m) for m in messages], list(tools or ()))
    words = [f"QX{n}XQ" for n in range(len(parts))]
    for part, word in zip(parts, words, strict=True):
        part.replace(changed, word)
    try:
        return tokenizer.render_text(changed[0], True, changed[1] or None, arguments), words
    except UserError:
        return None, words


def _parts(i: int, message: Mapping[str, Any]) -> list[Part]:
    """What a message says to the model that answers it: its content (an assistant's after its thinking, and not beside calls) and its calls."""
    calls, content, found = message.get("tool_calls") or [], message["content"], []
    thought, tag, said = content.rpartition("</think>") if message["role"] == "assistant" else ("", "", content)
    if said.strip() and not (calls and message["role"] == "assistant"):
        escaped = json.dumps(said.strip(), ensure_ascii=False)[1:-1]

        def replace(changed: Conversation, word: str) -> None:
            changed[0][i]["content"] = thought + tag + word

        found.append(Part(f"message {i} ({message['role']})", said.strip(), (said.strip(), escaped), replace))
    return found + [_call(i, k, message) for k in range(len(calls))]


def _call(i: int, k: int, message: Mapping[str, Any]) -> Part:
    def replace(changed: Conversation, word: str) -> None:
        calls = list(changed[0][i]["tool_calls"])
        calls[k] = _named(calls[k], word)
        changed[0][i]["tool_calls"] = calls

    function = message["tool_calls"][k].get("function", message["tool_calls"][k])
    written = json.dumps(function.get("arguments"), ensure_ascii=False, default=str)
    return Part(f"the call of message {i}", function["name"], (written,), replace)


def _tool(k: int, tool: Any) -> Part:
    def replace(changed: Conversation, word: str) -> None:
        changed[1][k] = _named(tool, word)

    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    inside = function if isinstance(function, dict) else {}
    texts = [json.dumps(tool, ensure_ascii=False, default=str), json.dumps(function, ensure_ascii=False, default=str), str(inside.get("description") or "")]
    return Part(f"tool {k}", str(inside.get("name", tool)), tuple(texts), replace)


def _named(tool: Any, word: str) -> Any:
    """A tool, or a call of one, by another name."""
    if not isinstance(tool, dict):
        return tool
    return {**tool, "function": {**tool["function"], "name": word}} if isinstance(tool.get("function"), dict) else {**tool, "name": word}
