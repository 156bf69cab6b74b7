"""The rollout function of a harness: an agent in its own code asks the policy through the endpoint, in a session an
episode.

The agent is a function, in this process or in processes of another interpreter (`agent_process`), or a program that is
started for each episode. One that fails, or never asks, has no result.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ptf.config import Plugin, plugin
from ptf.config.sections.rollout import HarnessConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.tool_calls import parser, parser_of
from ptf.data.trajectory import NoResult, Prompt, Trajectory
from ptf.rl.endpoint.agent_process import AgentProcesses, new_reply
from ptf.rl.endpoint.agent_program import checked, said
from ptf.rl.endpoint.confined import ENDS_WITHIN_S, HarnessFault, ProcessEnded, confined, variables
from ptf.rl.endpoint.endpoint import Endpoint
from ptf.rl.endpoint.session import Bounds, Session
from ptf.rl.loopback import unproxied
from ptf.rl.policy.policy import Policy

MAX_RESULT = 1 << 20  # bytes
MAX_ERRORS = 1 << 16  # bytes of a program's standard error that are kept


class HarnessRollout:
    """Plays episodes with an agent in its own code. Raises UserError if `python` cannot run the agent."""

    def __init__(self, config: HarnessConfig, tokenizer: Tokenizer) -> None:
        self.config, named = config, config.tool_format
        # without a format an agent without tools is served; one with tools is refused
        self.form = parser(named) if named is not None else parser_of(tokenizer.hf.chat_template)
        self.processes = AgentProcesses(config) if config.python else None  # of another interpreter
        self.endpoint = Endpoint()  # a new one whenever it is entered

    async def __aenter__(self) -> "HarnessRollout":
        os.environ.update(unproxied(os.environ))  # for an agent in this process
        self.endpoint = Endpoint()
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.close()

    def close(self) -> None:
        """End the processes of the agent."""
        if self.processes is not None:
            self.processes.close()

    async def __call__(self, prompt: Prompt, policy: Policy) -> Trajectory:
        """Play one episode. It is over when the agent ends, whatever it has asked then."""
        try:
            return await self._play(prompt, policy, **({"played_again": 0} if self.processes else {}))
        except ProcessEnded:
            policy.begin_again()
        try:
            return await self._play(prompt, policy, played_again=1)
        except ProcessEnded as error:
            return policy.trajectory(NoResult(str(error)), counts={"played_again": 1})

    async def _play(self, prompt: Prompt, policy: Policy, **counts: int) -> Trajectory:
        """Play an episode in a session of its own. Raises ProcessEnded."""
        session = Session(policy, self.form, Bounds(), self.config.models)
        session.counts.update(counts)
        url = self.endpoint.open(session)
        result: str | None = None
        outcome: float | NoResult | None = None
        try:
            task = (prompt.row, url, session.agent_key, policy.seed)
            if self.processes is not None:
                outcome = await self.processes.play(*task)
            elif self.config.agent is not None:
                outcome = await self._call(self.config.agent, *task)
            else:
                result = await run_program(self.config, *task)
        except HarnessFault as error:
            outcome = NoResult(str(error))
        finally:
            await session.close()
        if session.reward is not None and not isinstance(outcome, NoResult):
            outcome = session.reward
        if not policy.calls and not isinstance(outcome, NoResult):
            refused = f"; its last request was refused: {session.refused}" if session.refused else ""
            outcome = NoResult(f"the harness received no response from the policy{refused}")
        return session.trajectory(outcome, result)

    @staticmethod
    async def _call(what: Plugin, row: Mapping[str, Any], *task: Any) -> float | None:
        """Return what the agent's function returns. Raises HarnessFault."""
        agent, arguments = plugin.bind(what), (dict(row), *task)
        try:
            if inspect.iscoroutinefunction(plugin.resolve(what.use)):
                value: Any = await agent(*arguments)
            else:
                value = await in_thread(agent, *arguments)
            return checked(value)
        except Exception as error:
            raise HarnessFault(f"the agent raised {said(error)}") from error


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a thread of its own: the event loop's few threads would make agents wait for
    each other. A thread whose episode is over ends with its next request, or with the process."""
    done = new_reply()

    def run() -> None:
        try:
            value = function(*arguments)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(value)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(done)


async def run_program(
    config: HarnessConfig, row: Mapping[str, Any], base_url: str, api_key: str, seed: int
) -> str | None:
    """Run the program of one episode to its end; return the result that it wrote, None without one. Raises
    HarnessFault."""
    if missing := [name for name in config.columns if name not in row]:
        raise HarnessFault(f"the row has no column {missing[0]} (rollout.harness.columns)")
    task = {**{name: row[name] for name in ("messages", *config.columns) if name in row}, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="ptf-harness-", ignore_cleanup_errors=True) as place:
        result = Path(place) / "result"
        process = await asyncio.create_subprocess_exec(
            *confined(config.command, place),
            env={
                **variables(config.env_vars, place),
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "PTF_RESULT": str(result),
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            status, errors = await _ended(process, json.dumps(task, default=str).encode() + b"\n")
        finally:
            await _kill(process)
        if status != 0:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no line of error"]
            raise HarnessFault(f"the harness ended with status {status}: {last[0][:500]}")
        return _result(result)


async def _ended(process: asyncio.subprocess.Process, line: bytes) -> tuple[int, bytes]:
    """Give the program its line; return its status and the end of its standard error."""
    assert process.stdin is not None
    errors = bytearray()
    reading = asyncio.create_task(_keep_last(process.stderr, errors))
    try:
        with contextlib.suppress(OSError):  # it need not read it
            process.stdin.write(line)
            await process.stdin.drain()
            process.stdin.close()
        status = await process.wait()
        await asyncio.wait([reading], timeout=0.2)  # what it has started may hold the pipe open
    finally:
        reading.cancel()
    return status, bytes(errors)


async def _keep_last(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    while stream is not None and (part := await stream.read(1 << 14)):
        kept += part
        del kept[:-MAX_ERRORS]


def _result(path: Path) -> str | None:
    """Return the text of the file that a harness wrote, None if there is none. Raises HarnessFault."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HarnessFault(f"the harness's result cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HarnessFault("the harness's result is no regular file")
    with open(descriptor, "rb") as file:
        text = file.read(MAX_RESULT + 1)
    if len(text) > MAX_RESULT:
        raise HarnessFault(f"the harness wrote a result of more than {MAX_RESULT} bytes")
    return text.decode(errors="replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the program with all that it has started; it has done so itself if it has ended."""
    if process.returncode is not None and process.returncode >= 0:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), ENDS_WITHIN_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
