"""Tools of an MCP server as an environment, and a reward function for the response.

`environment: {use: ptf.rl.environments.mcp:Mcp, args: {command: [my-server], reward: {use: ptf.rl.rewards:exact}}}`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.config import Plugin
from ptf.data.tool_calls import ToolCall, parser
from ptf.errors import raise_if_missing
from ptf.rl.environments.mcp_connection import McpConnection, transport
from ptf.rl.environments.protocol import Message, StepResult
from ptf.rl.rewards import concurrent

raise_if_missing("mcp", "mcp")


class Mcp:
    """An episode in which the agent calls tools, and ends with a response that calls none.

    The server is a `command`, started for each episode, with `env` as its environment variables besides PATH and HOME;
    or a `url` (streamable HTTP, with `headers`). Tool calls are read in the `format` of `ptf.data.tool_calls`. `reward`
    scores the text of the last response with the row. A result of more than `max_result_characters` is cut. A server
    that ends, fails, or gives no result within `timeout_s` is an error of the environment. The same calls must have the
    same results when an episode is replayed.
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
        self.reward = concurrent.reward_of(Plugin(**reward))
        self.tools: list[Mapping[str, Any]] = []
        self.connection: McpConnection | None = None

    async def reset(self) -> Sequence[Message]:
        """Connect to the server; return the row's messages."""
        self.connection = McpConnection(self.server, self.timeout_s)
        await self.connection.result(self.connection.opened.wait(), "list of tools")
        self.tools = self.connection.tools
        return self.row.get("messages") or [{"role": "user", "content": self.row["prompt"]}]

    async def step(self, text: str) -> StepResult:
        """Call the tools that the text names and return their results; score a text that calls none."""
        answer = self.format.parse(text, self.tools)
        if not answer.tool_calls:
            return StepResult(reward=await concurrent.overlapping_call(self.reward, self.row, text), done=True)
        self.turn += 1
        own, results = list[Message](), list[Message]()
        for number, call in enumerate(answer.tool_calls):
            ids = f"{self.turn:05d}{number:04d}"  # of nine characters, which some templates insist on
            own.append({"type": "function", "id": ids, "function": {"name": call.name, "arguments": call.arguments}})
            results.append({"role": "tool", "tool_call_id": ids, "name": call.name, "content": await self.result(call)})
        return StepResult(
            results, policy_message={"role": "assistant", "content": answer.content or "", "tool_calls": own}
        )

    async def result(self, call: ToolCall) -> str:
        """Return the text that a tool gives for a call, or why the call is wrong."""
        assert self.connection is not None
        names, arguments = [tool["function"]["name"] for tool in self.tools], json.loads(call.arguments)
        if call.name not in names:
            return f"Error: there is no tool {call.name}; the tools are {', '.join(names)}"
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {call.name} must be an object"
        text = await self.connection.call(call.name, arguments)
        left = len(text) - self.most
        return text if left <= 0 else f"{text[: self.most]}\n[{left} more characters]"

    async def close(self) -> None:
        """End the connection and the command."""
        if self.connection is not None:
            await self.connection.close()
