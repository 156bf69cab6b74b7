"""A response that arrives in pieces: its content as soon as it is certain, its tool calls at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from ptf.data.tool_calls.protocol import Format, ToolCall


class StreamedAnswer:
    """The pieces of one response. However a text is split, the result is that of `parse` on the whole.

    Content is given up to the first place where a tool call may begin, and the rest of it by `finish`.
    """

    def __init__(self, form: Format, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._form, self._tools = form, tools
        self._text = ""
        self._sent = 0  # characters of content

    def feed(self, text_delta: str) -> str:
        """Take the next piece of text; return the content that is now certain and was not returned before."""
        self._text += text_delta
        return self._rest_of(self._form.certain(self._text))

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the rest of the content, and the tool calls."""
        answer = self._form.parse(self._text, self._tools)
        return self._rest_of(answer.content or ""), answer.tool_calls

    def _rest_of(self, content: str) -> str:
        rest = content[self._sent :]
        self._sent = max(self._sent, len(content))
        return rest
