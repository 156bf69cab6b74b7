"""Scoring of responses with the rewards of a job: one of all sources, or one for each of several. They run in worker
processes, which may crash or hang without harm.

A call that raises, returns no number, or takes too long is retried; if it fails again the outcome is `NoResult` with
the reason, never 0.0.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from ptf.config import Plugin, plugin
from ptf.config.reward_signature import RewardSignature, reward_fault
from ptf.data.trajectory import Group, NoResult, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.rewards.calls import EpisodeView, Response
from ptf.rl.rewards.declarations import first_lines
from ptf.rl.worker_messages import Fault
from ptf.rl.worker_process import CallQueue, QueuedCall, WorkerProcess


class RewardWorkers:
    """One reward in `processes` worker processes, which `close` ends. Raises UserError if it is no reward."""

    def __init__(
        self, reward: Plugin, timeout_s: float = 10.0, *, processes: int = 1, retries: int = 1, within_s: float = 1800.0
    ) -> None:
        self.reward, self.retries, self.within_s = reward, retries, within_s
        target = plugin.resolve(reward.use)
        if callable(target) and (fault := reward_fault(target, reward.use, reward.args)):
            raise UserError(fault)
        self.signature = RewardSignature.of(target, reward.args)
        for line in first_lines(reward):
            print(line, flush=True)
        self.calls = CallQueue()
        self.workers = [WorkerProcess("reward", reward, timeout_s, self.calls) for _ in range(processes)]
        self.retried = 0  # responses that were scored once more
        self.reported = False  # whether a fault of these responses was printed; the others are only counted

    def score(self, items: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | NoResult]:
        """Return the outcomes of responses to different prompts, each a row and a text, in order."""
        with GroupScoring(Rewards()) as scoring:
            for number, (row, text) in enumerate(items):
                scoring.ask(number, self, [Response(dict(row), text)])
            return [outcome for (outcome,) in scoring.outcomes().values()]

    def report(self, reason: str, where: str = "") -> None:
        """Print the first fault when it happens, because each later one may take the whole time limit.

        `where` is the place of the response's row.
        """
        if not self.reported:
            self.reported = True
            again = "; it is called again" if self.retries else ""
            to_row = f" to {where}" if where else ""
            print(f"the reward {self.reward.use} failed for a response{to_row}{again}: {reason}", flush=True)

    def take_retries(self) -> int:
        """Return how many responses were scored once more since the last call."""
        retried, self.retried = self.retried, 0
        return retried

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()


class Rewards(dict[str, tuple[RewardWorkers, float]]):
    """Rewards and the factors on them, by source; the one of all sources has the name "". It may be empty."""

    def take_retries(self) -> int:
        """Return how many responses were scored once more since the last call."""
        return sum(workers.take_retries() for workers, _ in self.values())

    def close(self) -> None:
        """End the processes."""
        for workers, _ in self.values():
            workers.close()


class GroupScoring(contextlib.AbstractContextManager["GroupScoring"]):
    """Groups that are scored while others are still generated.

    `add` is called with each group as soon as it is there, from any thread; `finish` returns all of them with their
    outcomes: those that their rollout functions gave, otherwise those of their sources' rewards. Responses of a source
    without a reward stay as they are.

    A response without a result is scored up to `retries` times more: of a group all are scored again, of a batch those
    without a result, one by one. `within_s` seconds after `outcomes` was called, none is scored.
    """

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self.weights: dict[int, float] = {}  # number of a group → the factor on its rewards
        self.lock = threading.Lock()
        self.groups: dict[int, list[int]] = {}  # number of a group → the numbers of its responses
        self.responses: list[tuple[RewardWorkers, Response]] = []
        self.batches: dict[RewardWorkers, list[int]] = {}  # that wait for further responses
        self.ended = SimpleQueue[Future[Any]]()
        self.waiting: dict[Future[Any], list[int]] = {}

    def __exit__(self, *_: object) -> None:
        for future in list(self.waiting):
            future.cancel()

    def add(self, number: int, group: Group) -> None:
        """Begin to score a group, which has this number among all groups.

        A replica that was replaced may have given it before.
        """
        reward = self.rewards.get(group[0].prompt.source, self.rewards.get(""))
        if reward is not None:
            workers, self.weights[number] = reward
            self.ask(number, workers, responses_left_to(workers, group))

    def finish(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with their outcomes."""
        for number, group in enumerate(groups):
            self.add(number, group)
        scored = list(groups)
        for number, outcomes in self.outcomes().items():
            weight, group = self.weights[number], groups[number]
            # of the responses that have no outcome from their rollout function
            rest = (Reward(weight * one.value) if isinstance(one, Reward) else one for one in outcomes)
            scored[number] = tuple(t if t.outcome is not None else replace(t, outcome=next(rest)) for t in group)
        return scored

    def ask(self, number: int, workers: RewardWorkers, group: Sequence[Response]) -> None:
        """Begin to score the responses of a group; one whose number is known has been asked for."""
        with self.lock:
            if number in self.groups:
                return
            numbers = list(range(len(self.responses), len(self.responses) + len(group)))
            self.responses += [(workers, response) for response in group]
            self.groups[number] = numbers
            if workers not in self.batches:
                self.batches[workers], workers.reported = [], False
            if workers.signature.scores == "group":
                self._call(numbers)
                return
            self.batches[workers] += numbers
            while len(self.batches[workers]) >= (most := workers.signature.max_size):
                self._call(self.batches[workers][:most])
                self.batches[workers] = self.batches[workers][most:]

    def _call(self, numbers: list[int]) -> None:
        """Have one call score these responses; of none there is no call."""
        if not numbers:
            return
        call = QueuedCall(tuple(self.responses[i][1] for i in numbers))
        self.waiting[call.future] = numbers
        call.future.add_done_callback(self.ended.put)
        self.responses[numbers[0]][0].calls.put(call)

    def outcomes(self) -> dict[int, list[Reward | NoResult]]:
        """Return the outcomes of the responses of each group."""
        until = time.monotonic() + max((workers.within_s for workers in self.batches), default=0.0)
        for numbers in self.batches.values():
            self._call(numbers)
        late = NoResult("it was not scored: scoring took longer than compute.timeout_s")
        outcomes: list[Reward | NoResult] = [late] * len(self.responses)
        retries = [0] * len(self.responses)
        with contextlib.suppress(Empty):  # no more time
            while self.waiting:
                future = self.ended.get(timeout=max(0.0, until - time.monotonic()))
                numbers = self.waiting.pop(future)
                workers, _ = self.responses[numbers[0]]
                for i, outcome in zip(numbers, outcomes_of(future.result(), len(numbers)), strict=True):
                    outcomes[i] = outcome
                    if isinstance(outcome, NoResult):
                        workers.report(outcome.reason, self.responses[i][1].where)
                failed = [i for i in numbers if isinstance(outcomes[i], NoResult) and retries[i] < workers.retries]
                # the responses of a group are scored again in one call, others one by one
                for call in [failed] if workers.signature.scores == "group" else [[i] for i in failed]:
                    workers.retried += len(call)
                    for i in call:
                        retries[i] += 1
                    self._call(call)
        return {number: [outcomes[i] for i in numbers] for number, numbers in self.groups.items()}


def outcomes_of(reply: Any, count: int) -> list[Reward | NoResult]:
    """Return a reply of a reward's process as the outcomes of `count` responses: a Fault has no result."""
    if isinstance(reply, Fault):
        return [NoResult(reply.reason)] * count
    return [NoResult(one.reason) if isinstance(one, Fault) else Reward(one) for one in reply]


def responses_left_to(workers: RewardWorkers, group: Group) -> list[Response]:
    """Return the responses of a group that its rollout function left to the reward."""
    row = dict(group[0].prompt.row)  # one object, which is sent once for a whole group
    return [
        Response(row, t.text, EpisodeView.of(t) if workers.signature.sees_episodes else None, t.prompt.where)
        for t in group
        if t.outcome is None
    ]


def score_groups(rewards: Rewards, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with their outcomes; of sources without a reward, with those of their rollout functions."""
    with GroupScoring(rewards) as scoring:
        return scoring.finish(groups)


def mark_without_result(t: Trajectory) -> Trajectory:
    """Return the episode; one that nothing has scored gets the outcome NoResult."""
    if t.outcome is not None:
        return t
    reason = "nothing scored the episode: its agent or rollout function gave no reward, and there is no rollout.reward"
    return replace(t, outcome=NoResult(reason))
