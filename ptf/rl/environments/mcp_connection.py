"""A connection to an MCP server, for one episode: to a command that is started for it, or to a URL.

A task holds the connection, because the library wants it to be opened and closed by the same task, and the methods of
an environment are called in different ones.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ptf.errors import UserError
from ptf.rl.endpoint.confined import confined
from ptf.rl.loopback import mounts


def transport(command: Sequence[str], url: str | None, env: Mapping[str, str], headers: Mapping[str, str]) -> Any:
    """Return the library's transport to a command or to a URL. Raises UserError unless there is exactly one of them."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if bool(command) == bool(url) or isinstance(command, str):
        raise UserError("an MCP server is a `command`, a list of words, or a `url`")
    if url:
        return over_http(url, headers)
    python, *arguments = confined(command)
    return stdio_client(StdioServerParameters(command=python, args=arguments, env=dict(env)))


@contextlib.asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """Open the transport to a URL, with these headers in every request."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    client = httpx2.AsyncClient(headers=dict(headers), timeout=None, mounts=mounts(url))  # callers have a limit
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class McpConnection:
    """An open connection; `tools` are the server's."""

    def __init__(self, server: Any, timeout_s: float) -> None:
        self.server, self.timeout_s = server, timeout_s
        self.tools: list[Mapping[str, Any]] = []  # as in chat completions
        self.client: Any = None
        self.opened = asyncio.Event()
        self.task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        """Open the connection, read the list of tools, and keep it open until the task is cancelled."""
        from mcp import Client

        async with Client(self.server, cache=None) as self.client:
            cursor = None
            while True:
                page = await self.client.list_tools(cursor=cursor)
                for tool in page.tools:
                    function = {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    }
                    self.tools.append({"type": "function", "function": function})
                if (cursor := page.next_cursor) is None:
                    break
            self.opened.set()
            await asyncio.Event().wait()

    async def result(self, wait: Any, what: str) -> Any:
        """Return the result of a coroutine. Raises ConnectionError if the connection ends first, or TimeoutError."""
        task = asyncio.ensure_future(wait)
        await asyncio.wait({task, self.task}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        if not self.task.done():
            raise TimeoutError(f"the MCP server gave no {what} within {self.timeout_s:g} s")
        error = None if self.task.cancelled() else self.task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise ConnectionError(f"the connection to the MCP server ended before its {what}: {error!r}")

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result, or what the tool or the server says is wrong with the call."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import INVALID_PARAMS

        try:
            result = await self.result(self.client.call_tool(name, arguments), f"result of {name}")
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return f"Error: {error.message}"
            raise ConnectionError(f"the MCP server failed in {name}: {error.message}") from error
        texts = [getattr(part, "text", None) for part in result.content]
        return "\n".join(
            f"[{part.type}]" if text is None else text for part, text in zip(result.content, texts, strict=True)
        )

    async def close(self) -> None:
        """End the connection, and the command."""
        self.task.cancel()
        await asyncio.wait({self.task})
