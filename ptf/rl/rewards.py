"""Scoring answers with a plain function, in a process of its own that may crash or hang without harm.

The one idea: a reward that raises, returns no number, or takes too long gives `NoResult` with the reason, never 0.0; a hung process is
killed and replaced. Run as `python -m ptf.rl.rewards` it is the worker: it reads (row, text) pairs from a pipe until the pipe closes.
"""

import contextlib
import math
import multiprocessing.connection as mpc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.compute.launch import leave_with_parent
from ptf.config import Plug, plug
from ptf.data.trajectory import Group, NoResult, Reward
from ptf.errors import UserError


def numeric(row: Mapping[str, Any], text: str, *, column: str = "answer") -> float:
    """1.0 if the answer equals the row's `column`, as numbers where both are, else as text."""
    wanted, given = str(row[column]).strip(), text.strip()
    try:
        return float(math.isclose(float(wanted.replace(",", "")), float(given.replace(",", "")), rel_tol=1e-6, abs_tol=1e-9))
    except ValueError:
        return float(wanted == given)


class Rewards:
    """A worker process for one reward function. `close` ends it."""

    def __init__(self, reward: Plug, timeout_s: float = 10.0) -> None:
        plug.bind(reward)  # a name that does not resolve is an error now, in this process
        self.reward, self.timeout_s = reward, timeout_s
        self.process: subprocess.Popen | None = None
        self.pipe: mpc.Connection | None = None

    def _start(self) -> mpc.Connection:
        ours, theirs = mpc.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ptf.rl.rewards", str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.pipe = ours
        try:
            ours.send(self.reward.model_dump())
            ready = ours.poll(60) and ours.recv() == "ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise UserError(f"the process for the reward {self.reward.use} died or did not start in 60 s; its lines above say why")
        return ours

    def score(self, items: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | NoResult]:
        """Outcomes in order; at most `timeout_s` seconds each."""
        outcomes: list[Reward | NoResult] = []
        while len(outcomes) < len(items):
            served = self.pipe is None  # a process that has just started and dies has died on its first answer
            pipe = self.pipe or self._start()
            try:
                pipe.send([(dict(row), text) for row, text in items[len(outcomes) :]])
                while len(outcomes) < len(items):
                    if not pipe.poll(self.timeout_s):
                        outcomes.append(NoResult(f"took longer than {self.timeout_s:g} s"))
                        self.close()
                        break
                    outcomes.append(pipe.recv())
                    served = True
            except (EOFError, OSError):
                self.close()
                if served:  # it died on this answer; if it was dead before, a new one gets the same answer
                    outcomes.append(NoResult("the reward's process died"))
        return outcomes

    def close(self) -> None:
        if self.pipe:
            self.pipe.close()
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what the reward started dies with it
            self.process.wait(10)
        self.pipe = self.process = None


def score_groups(rewards: Rewards, groups: Sequence[Group]) -> list[Group]:
    """The groups with their outcomes."""
    outcomes = iter(rewards.score([(t.prompt.row, t.text) for group in groups for t in group]))
    return [tuple(replace(t, outcome=next(outcomes)) for t in group) for group in groups]


def serve(pipe: mpc.Connection) -> None:
    """The worker's loop; it ends with the process that started it, even while a reward hangs."""
    leave_with_parent()
    function = plug.bind(Plug(**pipe.recv()))
    pipe.send("ready")
    while True:
        try:
            items = pipe.recv()
        except EOFError:
            return
        for row, text in items:
            try:
                value = float(function(row, text))
                outcome = Reward(value) if math.isfinite(value) else NoResult(f"the reward is {value}")
            except Exception as error:  # whatever a reward does wrong is one answer without a result
                outcome = NoResult(f"{type(error).__name__}: {error}")
            pipe.send(outcome)


if __name__ == "__main__":
    from ptf.rl import rewards  # the classes that are sent must be the package's, not __main__'s

    rewards.serve(mpc.Connection(int(sys.argv[1])))
