"""Tools of an MCP server as an environment, and a reward function for the response.

`environment: {use: ptf.rl.environments.mcp:Mcp, args: {command: [my-server], reward: {use: ptf.rl.rewards:exact}}}`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ptf.config import Plugin
from ptf.data.tool_calls import ToolCall, parser
from ptf.errors import UserError, raise_if_missing
from ptf.rl.endpoint.confined import confined
from ptf.rl.environments.protocol import Message, StepResult
from ptf.rl.loopback import mounts
from ptf.rl.rewards.declarations import overlapping_call, reward_of

raise_if_missing("mcp", "mcp")


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


class Mcp:
    """An episode in which the agent calls tools, and ends with a response that calls none.

    The server is a `command`, started for each episode, with `env` as its environment variables besides PATH and HOME;
    or a `url` (streamable HTTP, with `headers`). Tool calls are read in the `format` of `ptf.data.tool_calls`. `reward`
    scores the text of the last response with the row. A result of more than `max_result_characters` is cut. A server
    that ends, fails, or gives no result within `timeout_s` is an error of the environment. The same calls must have the
    same results when an episode is replayed.

    A task holds the connection, because the library wants it to be opened and closed by the same task, and the
    methods of an environment are called in different ones.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        *,
        reward: Mapping[str, Any],
        command: Sequence[str] = (),
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        format: str = "hermes",
        timeout_s: float = 8.0,
        max_result_characters: int = 20_000,
    ) -> None:
        self.row, self.timeout_s, self.most = row, timeout_s, max_result_characters
        self.server = transport(command, url, env or {}, headers or {})
        self.format, self.turn = parser(format), 0
        self.reward = reward_of(Plugin(**reward))
        self.tools: list[Mapping[str, Any]] = []  # as in chat completions
        self.client: Any = None
        self.opened = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def reset(self) -> Sequence[Message]:
        """Connect to the server; return the row's messages."""
        self.task = asyncio.create_task(self._hold())
        await self.waited(self.opened.wait(), "list of tools")
        return self.row.get("messages") or [{"role": "user", "content": self.row["prompt"]}]

    async def step(self, text: str) -> StepResult:
        """Call the tools that the text names and return their results; score a text that calls none."""
        answer = self.format.parse(text, self.tools)
        if not answer.tool_calls:
            return StepResult(reward=await overlapping_call(self.reward, self.row, text), done=True)
        self.turn += 1
        own, results = list[Message](), list[Message]()
        for number, call in enumerate(answer.tool_calls):
            ids = f"{self.turn:05d}{number:04d}"  # of nine characters, which some templates insist on
            own.append({"type": "function", "id": ids, "function": {"name": call.name, "arguments": call.arguments}})
            results.append({"role": "tool", "tool_call_id": ids, "name": call.name, "content": await self.result(call)})
        return StepResult(
            results, policy_message={"role": "assistant", "content": answer.content or "", "tool_calls": own}
        )

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

    async def waited(self, wait: Any, what: str) -> Any:
        """Return the result of a coroutine. Raises ConnectionError if the connection ends first, or TimeoutError."""
        assert self.task is not None
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

    async def result(self, call: ToolCall) -> str:
        """Return the text that a tool gives for a call, or why the call is wrong, as is known here or as the tool or
        the server says."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import INVALID_PARAMS

        names, arguments = [tool["function"]["name"] for tool in self.tools], json.loads(call.arguments)
        if call.name not in names:
            return f"Error: there is no tool {call.name}; the tools are {', '.join(names)}"
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {call.name} must be an object"
        try:
            result = await self.waited(self.client.call_tool(call.name, arguments), f"result of {call.name}")
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        except MCPError as error:
            if error.code != INVALID_PARAMS:
                raise ConnectionError(f"the MCP server failed in {call.name}: {error.message}") from error
            text = f"Error: {error.message}"
        left = len(text) - self.most
        return text if left <= 0 else f"{text[: self.most]}\n[{left} more characters]"

    async def close(self) -> None:
        """End the connection and the command."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
