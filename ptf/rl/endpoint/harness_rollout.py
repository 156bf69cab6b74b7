"""The rollout function of a harness: an agent in its own code asks the policy through the endpoint, in a session an
episode.

The agent is a function, in this process or in processes of another interpreter (`agent_process`), or a program that is
started for each episode (`agent_command`). One that fails, or never asks, has no result.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ptf.config import Plugin, plugin
from ptf.config.sections.rollout import HarnessConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.tool_calls import parser, parser_of
from ptf.data.trajectory import NoResult, Prompt, Trajectory
from ptf.rl.endpoint import agent_command
from ptf.rl.endpoint.agent_process import AgentProcesses, new_reply
from ptf.rl.endpoint.agent_program import checked, said
from ptf.rl.endpoint.confined import HarnessFault, ProcessEnded
from ptf.rl.endpoint.endpoint import Endpoint
from ptf.rl.endpoint.session import Bounds, Session
from ptf.rl.loopback import unproxied
from ptf.rl.policy.policy import Policy


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
                result = await agent_command.run(self.config, *task)
        except HarnessFault as error:
            outcome = NoResult(str(error))
        finally:
            await session.close()
        if session.reward is not None and not isinstance(outcome, NoResult):
            outcome = session.reward
        if not policy.calls and not isinstance(outcome, NoResult):
            refused = f"; its last request was refused: {session.refused}" if session.refused else ""
            outcome = NoResult(f"the harness received no response from the policy{refused}")
        return policy.trajectory(outcome, text=result, counts=session.counts)

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
