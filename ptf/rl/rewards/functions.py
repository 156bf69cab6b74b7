"""Scoring answers with plain functions, in worker processes that may crash or hang without harm.

A reward that raises, returns no number, or takes too long is retried; if it fails again the outcome is `NoResult` with
the reason, never 0.0.
"""

import asyncio
import logging
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from ptf.config import Plugin
from ptf.data.trajectory import Group, NoResult, Reward
from ptf.rl.rewards.concurrent import asynchronous, concurrent, first_lines, in_flight, is_asynchronous, one_by_one
from ptf.rl.rewards.sandbox.run_tests import run_tests, sandbox_line
from ptf.rl.worker_messages import Fault
from ptf.rl.worker_process import Call, CallQueue, WorkerProcess

RewardInput = tuple[Mapping[str, Any], str]  # a data row and the response that is scored


@one_by_one
def exact(row: Mapping[str, Any], text: str, *, column: str = "answer") -> float:
    """Return 1.0 if the response equals the row's `column`, ignoring white space around either; else 0.0."""
    return float(str(row[column]).strip() == text.strip())


@one_by_one
def numeric(row: Mapping[str, Any], text: str, *, column: str = "answer") -> float:
    """Return 1.0 if the response equals the row's `column`, as numbers where both are, else as text; otherwise 0.0."""
    wanted, given = str(row[column]).strip(), text.strip()
    try:
        return float(
            math.isclose(float(wanted.replace(",", "")), float(given.replace(",", "")), rel_tol=1e-6, abs_tol=1e-9)
        )
    except ValueError:
        return float(wanted == given)


@one_by_one
def mathematics(row: Mapping[str, Any], text: str, *, column: str = "answer", after: str = "") -> float:
    """Return 1.0 if the response is mathematically equal to the row's `column`, by math-verify; else 0.0.

    Of the response, the last expression counts that math-verify can read: `\\boxed{…}`, LaTeX or a plain expression.
    With `after` (`####` in GSM8K), the reference answer is the column's text after the last such mark; the response is
    not split. A row without a readable expression is an error, hence a response without a result.
    """
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports] - an extra: pip install math-verify

    # it warns that its own time limits, which need a main thread, are off; the worker process has a limit
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = str(row[column]).rpartition(after)[2].strip() if after else str(row[column])
    wanted = parse(gold if re.search(r"\\|\$", gold) else f"${gold}$", parsing_timeout=0)
    if not wanted:
        raise ValueError(f"math-verify reads no expression in {gold[:60]!r}")
    return float(verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0))


async def code_async(
    row: Mapping[str, Any],
    text: str,
    *,
    column: str = "tests",
    setup: str | None = None,
    entry: str | None = None,
    seconds: float = 4.0,
    memory_mib: int = 512,
    sandbox: str = "auto",
) -> float:
    """Run the unit tests of `code` in the sandbox without blocking the event loop, and return what `code` does."""
    sandbox_line(sandbox)
    options = {"setup": row[setup] if setup else None, "entry": str(row[entry]) if entry else None}
    verdict = await run_tests(last_block(text), row[column], **options, seconds=seconds, memory_mib=memory_mib)
    if verdict.value is None:
        raise ValueError(verdict.why)
    return verdict.value


@concurrent(code_async, lambda *, sandbox="auto", **_: [sandbox_line(sandbox)])
def code(row: Mapping[str, Any], text: str, **args: Any) -> float:
    """Return 1.0 if the response's Python (`last_block`) passes the tests in the row's `column`; else 0.0.

    The tests are a string or a list of strings. Rows whose tests are empty, assert nothing, never call the answer, or
    cannot run are errors, hence answers without a result.

    `setup`: a column of code that runs before the tests. `entry`: a column with the name of the function to write.
    `seconds` of CPU time and `memory_mib` are limits of each process; `sandbox: strict` refuses the mode `subreaper`,
    which isolates least. Tests and answer are two processes, separate from each other and from this one
    (ptf.rl.rewards.sandbox). A coroutine awaits `code_async` instead.
    """
    return asyncio.run(code_async(row, text, **args))


def last_block(text: str) -> str:
    """Return the code of an answer.

    It is the last fenced block that is marked as Python (python, py, python3, in any case); without one, the last block
    without a mark; without one, the whole text. A block that the end of the text cuts off counts.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})\s*([^`]*)$", line)
        if fence and mark and mark[1].startswith(fence) and not mark[2]:
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
        elif mark:
            fence = mark[1]
            blocks.append((re.split(r"[\s{}:,]", mark[2].strip().lstrip("{."))[0].lower(), []))
    for tags in (("python", "py", "python3", "py3"), ("",)):
        if matching := [lines for tag, lines in blocks if tag in tags]:
            return textwrap.dedent("\n".join(matching[-1]))
    return text


@one_by_one
def brevity(row: Mapping[str, Any], text: str, *, longest: int, margin: int) -> float:
    """Return 0 up to `longest - margin` characters, then linearly less, and −1 from `longest` characters on."""
    return max(-1.0, min(0.0, (longest - margin - len(text)) / margin))


def plugins(parts: Sequence[Mapping[str, Any]]) -> list[Plugin]:
    """Return the rewards of `parts` as plugins."""
    return [Plugin(use=part["use"], args=part.get("args", {})) for part in parts]


async def weighted_concurrently(row: Mapping[str, Any], text: str, *, parts: Sequence[Mapping[str, Any]]) -> float:
    """Return what `weighted` returns; its calls may overlap, and a part that is a plain function runs in a thread."""
    total = 0.0
    for part, plugin in zip(parts, plugins(parts), strict=True):
        function = asynchronous(plugin)
        if is_asynchronous(function):
            value = await function(row, text)
        elif in_flight(function) == 1:
            value = function(row, text)
        else:
            value = await asyncio.to_thread(function, row, text)
        total += part.get("weight", 1.0) * float(value)
    return total


def fewest_in_flight(*, parts: Sequence[Mapping[str, Any]]) -> int:
    """Return how many calls of `weighted` may overlap: the fewest of its parts that are coroutine functions."""
    functions = [asynchronous(plugin) for plugin in plugins(parts)]
    return min(in_flight(function) for function in functions if is_asynchronous(function))


@concurrent(
    weighted_concurrently,
    lambda *, parts: [line for plugin in plugins(parts) for line in first_lines(plugin)],
    where=lambda *, parts: any(is_asynchronous(asynchronous(plugin)) for plugin in plugins(parts)),
    in_flight=fewest_in_flight,
)
def weighted(row: Mapping[str, Any], text: str, *, parts: Sequence[Mapping[str, Any]]) -> float:
    """Return Σ weight · reward over `parts`, each {use, args, weight}; the default weight is 1.

    If one part has no result, the sum has none.
    """
    return asyncio.run(weighted_concurrently(row, text, parts=parts))


class RewardWorkers:
    """One reward function in `processes` worker processes, which `close` ends."""

    def __init__(
        self, reward: Plugin, timeout_s: float = 10.0, *, processes: int = 1, retries: int = 1, within_s: float = 1800.0
    ) -> None:
        self.reward, self.retries, self.within_s = reward, retries, within_s
        for line in first_lines(reward):
            print(line, flush=True)
        self.calls = CallQueue()
        self.workers = [WorkerProcess("reward", reward, timeout_s, self.calls) for _ in range(processes)]
        self.retried = 0  # answers that were scored once more
        self.reported = False  # whether a fault of these answers was printed; the others are only counted

    def score(self, items: Sequence[RewardInput]) -> list[Reward | NoResult]:
        """Return the outcomes in order.

        An answer without a result is scored up to `retries` times more; after `within_s` seconds none is scored.
        """
        until, self.reported = time.monotonic() + self.within_s, False
        outcomes: list[Any] = [NoResult("it was not scored: scoring took longer than compute.timeout_s")] * len(items)
        attempts, ended = [0] * len(items), SimpleQueue[Future[Any]]()
        waiting = {self._ask(item, ended): i for i, item in enumerate(items)}
        try:
            while waiting:
                future = ended.get(timeout=max(0.0, until - time.monotonic()))
                i = waiting.pop(future)
                outcomes[i] = outcome = outcome_of(future.result())
                if isinstance(outcome, NoResult):
                    self._report(outcome.reason)
                    if attempts[i] < self.retries:
                        attempts[i] += 1
                        self.retried += 1
                        waiting[self._ask(items[i], ended)] = i
        except Empty:  # no more time
            pass
        finally:
            for future in list(waiting):
                future.cancel()
        return outcomes

    def _ask(self, item: RewardInput, ended: "SimpleQueue[Future[Any]]") -> "Future[Any]":
        """Ask for a reward; when it is there, its future is put into `ended`."""
        call = Call((dict(item[0]), item[1]))
        call.future.add_done_callback(ended.put)
        self.calls.put(call)
        return call.future

    def _report(self, reason: str) -> None:
        """Print the first fault when it happens, because each later one may take the whole time limit."""
        if not self.reported:
            self.reported = True
            print(f"the reward {self.reward.use} has no result for an answer: {reason}", flush=True)

    def take_retries(self) -> int:
        """Return how many answers were scored once more since the last call."""
        retried, self.retried = self.retried, 0
        return retried

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()


def outcome_of(reply: Any) -> Reward | NoResult:
    """Return a reply of a reward's process as an outcome: a Fault has no result."""
    return NoResult(reply.reason) if isinstance(reply, Fault) else Reward(reply)


def score_groups(rewards: RewardWorkers | None, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with their outcomes; without rewards, with those of their environments."""
    if rewards is None:
        return list(groups)
    outcomes = iter(rewards.score([(t.prompt.row, t.text) for group in groups for t in group]))
    return [tuple(replace(t, outcome=next(outcomes)) for t in group) for group in groups]
