"""Environments of OpenEnv: each is a server in an interpreter or a container of its own, reached over a WebSocket.

`environment: {use: ptf.rl.environments.openenv:OpenEnv, args: {url: "http://127.0.0.1:8000", action: message}}`. What
is sent and received is that of openenv-core 0.3 (`/ws`: `reset`, `step`, `close`), which need not be installed here.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ptf.config import Plugin, plugin
from ptf.errors import UserError, raise_if_missing
from ptf.rl.environments.protocol import Message, StepResult
from ptf.rl.environments.seeds import seed_of_row

raise_if_missing("websockets", "openenv")

MOST_BYTES = 1 << 24  # of a message of the server
REFUSED = "VALIDATION_ERROR"  # the action has another form than the environment's
ADVICE = {"CAPACITY_REACHED": "; it must allow as many sessions as episodes run at once (max_concurrent_envs)"}
says = functools.partial(dict, role="user")


class OpenEnv:
    """One episode, a session of the server.

    `action` is the field of the action that is given the agent's text, or a plugin that returns all fields for a text.
    `observation` is the field that the agent reads, else all as JSON. The first message begins with `instruction`.
    `reset` is given the seed, and the row's `columns`. An action that the server refuses costs `penalty`, and the agent
    is told why. The server must allow as many sessions as episodes run at once; silence for `timeout_s` is an error.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        *,
        url: str,
        action: str | Mapping[str, Any] = "message",
        observation: str | None = None,
        instruction: str = "",
        columns: Sequence[str] = (),
        penalty: float = 0.1,
        timeout_s: float = 8.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise UserError(f"url: {url!r} is no address of the form http://host:port")
        self.address = parts._replace(scheme="ws" + "s" * parts.scheme.endswith("s"), path=f"{parts.path}/ws").geturl()
        self.act = plugin.bind(Plugin(**action)) if isinstance(action, Mapping) else lambda text: {action: text}
        self.instruction, self.observation, self.penalty, self.timeout_s = instruction, observation, penalty, timeout_s
        self.start = {"seed": seed_of_row(row, seed), **{name: row[name] for name in columns}}
        self.socket: Any = None

    async def reset(self) -> Sequence[Message]:
        """Open a session; return the first observation, after the instruction."""
        from websockets.asyncio.client import connect

        async with asyncio.timeout(self.timeout_s):
            self.socket = await connect(self.address, max_size=MOST_BYTES, proxy=None, close_timeout=1)
        shown = self.shown(await self.ask("reset", self.start))
        return [says(content=f"{self.instruction}\n{shown}".strip())]

    async def step(self, text: str) -> StepResult:
        """Take the action that the text stands for; return the next observation and the reward."""
        data = await self.ask("step", self.act(text))
        if "refused" in data:
            return StepResult([says(content=f"Your action was refused: {data['refused']}")], reward=-self.penalty)
        reward, done = float(data.get("reward") or 0.0), bool(data.get("done"))
        return StepResult([] if done else [says(content=self.shown(data))], reward=reward, done=done)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer. Raises RuntimeError for what the server says is an error."""
        line = json.dumps({"type": kind, "data": data})
        async with asyncio.timeout(self.timeout_s):
            with contextlib.suppress(Exception):  # the server may have said why, and closed
                await self.socket.send(line)
            answer = json.loads(await self.socket.recv())
        found = answer.get("data") or {}
        if answer.get("type") == "observation":
            return found
        code, message = found.get("code"), str(found.get("message"))[:500]
        if kind == "step" and code == REFUSED:
            return {"refused": "; ".join(str(one.get("msg")) for one in found.get("errors") or ()) or message}
        raise RuntimeError(f"{self.address} answers {kind} with {code}: {message}{ADVICE.get(str(code), '')}")

    def shown(self, data: Mapping[str, Any]) -> str:
        """Return what the agent reads of an observation."""
        fields = data.get("observation") or {}
        return json.dumps(fields) if self.observation is None else str(fields[self.observation])

    async def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            await self.socket.close()
