"""Processes in which an agent's function plays, with the interpreter that `rollout.harness.python` names.

To start an interpreter and to import an agent's packages takes seconds, so a process plays many episodes at once, for
as long as the run. The episodes of one that ended are played again, once. One that has ended, or that holds nothing but
episodes that are over for all but the agent, is replaced before the next episode.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.config.plugin import plugin_path
from ptf.config.sections.rollout import HarnessConfig
from ptf.errors import UserError
from ptf.rl.endpoint.agent_program import PREFIX
from ptf.rl.endpoint.confined import ENDS_WITHIN_S, HarnessFault, ProcessEnded, confined, variables
from ptf.workspace.credentials import resolved

PROGRAM = Path(__file__).with_name("agent_program.py")
STARTS_WITHIN_S = 120.0  # with the imports of the agent's module
STOPS_WITHIN_S = 1.0  # an agent whose episode has no time left

Reply = concurrent.futures.Future[float | None]


def new_reply() -> Reply:
    """Return a reply that nobody can cancel: the thread that reads can always set it."""
    reply = Reply()
    reply.set_running_or_notify_cancel()
    return reply


def json_line(**message: Any) -> str:
    """Return a message as a line. Raises TypeError for keys that JSON does not have."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)  # arrays as lists

    return json.dumps(message, default=plain) + "\n"


def own_file(use: str) -> str | None:
    """Return the file of a module of ptf, which another interpreter need not have; None for a module of others."""
    module = use.partition(":")[0]
    spec = importlib.util.find_spec(module) if module.startswith("ptf.") else None
    return spec.origin if spec else None


class AgentProcess:
    """One process, with a thread that reads its replies and one that writes to it."""

    def __init__(self, config: HarnessConfig) -> None:
        assert config.agent is not None
        assert config.python is not None
        self.agent, self.python = config.agent, config.python
        self.numbers, self.lock = itertools.count(), threading.Lock()
        self.ready, self.lines = new_reply(), queue.SimpleQueue[str | None]()
        self.waiting = dict[int | None, Reply]({None: self.ready})  # by the episode's number; None: the module
        self.left = dict[int, float]()  # episodes that are over, but not for the agent → since when
        self.started, self.coming = time.monotonic(), 0  # `coming`: episodes that wait until it is ready
        self.place = tempfile.mkdtemp(prefix=PREFIX)
        self.process = subprocess.Popen(
            confined([config.python, "-u", str(PROGRAM), self.place], self.place),
            env=variables(config.env_vars, self.place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            encoding="utf-8",
        )
        path, here = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))], [os.getcwd()]
        if {"", *here} & {*sys.path}:  # it is on this process's path too, before what is installed
            path += here
        own, args = [*plugin_path(), *here], resolved(self.agent.args, self.agent.use)
        self.lines.put(json_line(use=self.agent.use, args=args, path=path, own=own, file=own_file(self.agent.use)))
        for target in (self._read, self._write):
            threading.Thread(target=target, name="agent process", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until the agent's module is imported. Raises UserError."""
        try:
            self.ready.result(STARTS_WITHIN_S)
        except (HarnessFault, ProcessEnded, TimeoutError) as error:
            self.close()
            reason = str(error) or f"did not start within {STARTS_WITHIN_S:g} s"
            raise UserError(f"rollout.harness.agent: {self.agent.use} in {self.python}: {reason}") from error

    async def play(self, row: Mapping[str, Any], base_url: str, api_key: str, seed: int) -> float | None:
        """Return what the agent returns for an episode. Raises HarnessFault, and ProcessEnded."""
        self.coming += 1
        try:
            await asyncio.wrap_future(self.ready)
        finally:
            self.coming -= 1
        number, reply = next(self.numbers), new_reply()
        try:
            line = json_line(episode=number, row=dict(row), base_url=base_url, api_key=api_key, seed=seed)
        except (TypeError, ValueError) as error:
            raise HarnessFault(f"the row cannot be sent to the agent: {error}") from error
        with self.lock:
            self.waiting[number] = reply
        if self.process.poll() is not None:
            self._fail_all()
        self.lines.put(line)
        try:
            return await asyncio.wrap_future(reply)
        finally:
            with self.lock:
                if self.waiting.pop(number, None) is not None:  # cancelled: the episode has no time left
                    self.left[number] = time.monotonic()
                    self.lines.put(json_line(cancel=number))

    @property
    def should_be_replaced(self) -> bool:
        """Whether it has ended, does not begin, or all that is in it are agents that do not stop."""
        if self.process.poll() is not None:
            return True
        if not self.ready.done():
            return time.monotonic() - self.started > STARTS_WITHIN_S
        with self.lock:
            stuck = self.left and time.monotonic() - min(self.left.values()) > STOPS_WITHIN_S
            return bool(stuck and not self.waiting)

    def close(self) -> None:
        """End the process and all that it has started."""
        self.lines.put(None)
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as pipe:
            while (line := self.lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            with self.process.stdout as pipe:
                for line in pipe:
                    try:
                        message = json.loads(line)
                    except ValueError:  # of a start-up script of the interpreter
                        print(line, end="", file=sys.stderr, flush=True)
                        continue
                    self._take(message)
        finally:
            try:
                self.close()
            finally:
                self._fail_all()

    def _take(self, message: Mapping[str, Any]) -> None:
        number: Any = message.get("episode")  # None: it says that the agent's module is imported, or why not
        with self.lock:
            self.left.pop(number, None)
            reply = self.waiting.pop(number, None)
        if reply is None:
            return
        if "error" in message:
            reply.set_exception(HarnessFault(f"the agent raised {message['error']}"))
        else:
            reply.set_result(message.get("reward"))

    def _fail_all(self) -> None:
        error = ProcessEnded(f"the process of the agent ended with status {self.process.returncode}")
        with self.lock:
            replies = list(self.waiting.values())
            self.waiting.clear()
        for reply in replies:
            reply.set_exception(error)


class AgentProcesses:
    """The processes of a harness; an episode goes to the one with the fewest."""

    def __init__(self, config: HarnessConfig) -> None:
        """Start the processes. Raises UserError if the agent cannot be imported there."""
        if shutil.which(config.python or "") is None:
            raise UserError(f"rollout.harness.python: there is no program {config.python}")
        self.config = config
        self.processes: list[AgentProcess] = []
        try:
            for _ in range(config.processes):
                self.processes.append(AgentProcess(config))
            for process in self.processes:
                process.wait_until_ready()
        except BaseException:
            self.close()
            raise

    async def play(self, row: Mapping[str, Any], base_url: str, api_key: str, seed: int) -> float | None:
        """Return what the agent returns for an episode. Raises HarnessFault, and ProcessEnded."""
        for i, process in enumerate(self.processes):
            if process.should_be_replaced:
                self.processes[i] = AgentProcess(self.config)
                await asyncio.to_thread(process.close)
        process = min(self.processes, key=lambda one: one.coming + len(one.waiting) - (None in one.waiting))
        return await process.play(row, base_url, api_key, seed)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.close()
