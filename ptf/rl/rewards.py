"""Scoring answers with plain functions, in processes of their own that may crash or hang without harm.

The one idea: a reward that raises, returns no number, or takes too long gives `NoResult` with the reason, never 0.0, after it was asked again.
"""

import asyncio
import inspect
import logging
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ptf.config import Plug
from ptf.data.trajectory import Group, NoResult, Reward
from ptf.rl.at_once import asynchronous, first_lines, is_asynchronous, many_at_once
from ptf.rl.child import Child, Fault
from ptf.rl.sandbox.judge import announced, judge

Scored = tuple[Mapping[str, Any], str]  # a data row and an answer


def exact(row: Mapping[str, Any], text: str, *, column: str = "answer") -> float:
    """1.0 if the answer is the row's `column`, white space around either aside."""
    return float(str(row[column]).strip() == text.strip())


def numeric(row: Mapping[str, Any], text: str, *, column: str = "answer") -> float:
    """1.0 if the answer equals the row's `column`, as numbers where both are, else as text."""
    wanted, given = str(row[column]).strip(), text.strip()
    try:
        return float(math.isclose(float(wanted.replace(",", "")), float(given.replace(",", "")), rel_tol=1e-6, abs_tol=1e-9))
    except ValueError:
        return float(wanted == given)


def mathematics(row: Mapping[str, Any], text: str, *, column: str = "answer", after: str = "") -> float:
    """1.0 if math-verify finds the answer (the last one that it can read: `\\boxed{…}`, LaTeX or a plain expression) to be the row's `column`, or what
    stands there after the last `after` (`####` in GSM8K). Rows with nothing there that it can read are errors, hence answers without a result."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports] - an extra: pip install math-verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadlines, which need a main thread, are off; the process has one
    gold = str(row[column]).rpartition(after)[2].strip() if after else str(row[column])
    wanted = parse(gold if re.search(r"\\|\$", gold) else f"${gold}$", parsing_timeout=0)
    if not wanted:
        raise ValueError(f"math-verify reads no expression in {gold[:60]!r}")
    return float(verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0))


async def judged_code(
    row: Mapping[str, Any], text: str, *, column: str = "tests", setup: str | None = None, entry: str | None = None, seconds: float = 4.0,
    memory_mib: int = 512, sandbox: str = "auto",
) -> float:  # fmt: skip
    """`code`, of which many may run at once."""
    announced(sandbox)
    options = {"setup": row[setup] if setup else None, "entry": str(row[entry]) if entry else None}
    verdict = await judge(last_block(text), row[column], **options, seconds=seconds, memory_mib=memory_mib)
    if verdict.value is None:
        raise ValueError(verdict.why)
    return verdict.value


@many_at_once(judged_code, lambda *, sandbox="auto", **_: [announced(sandbox)])
def code(row: Mapping[str, Any], text: str, **args: Any) -> float:
    """1.0 if the answer's Python (`last_block`) passes the row's `column` of tests, a string or a list of strings; else 0.0. Rows whose tests are empty,
    assert nothing, never ask the answer for anything or cannot run are errors, hence answers without a result.

    `setup`: a column of code that runs before the tests. `entry`: a column with the name of the function that is asked for. `seconds` of the processor's
    and `memory_mib` for each process; `sandbox: strict` refuses machines without namespaces. The tests' side and the answer's are processes apart from
    each other and from this one (ptf.rl.sandbox). A coroutine awaits `judged_code` instead."""
    return asyncio.run(judged_code(row, text, **args))


def last_block(text: str) -> str:
    """The code of an answer: the last fenced block that says it is Python (python, py, python3, in any case); without such, the last that says nothing;
    without such, all of it. A block that the text's end cuts off counts."""
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
        if found := [lines for tag, lines in blocks if tag in tags]:
            return textwrap.dedent("\n".join(found[-1]))
    return text


def brevity(row: Mapping[str, Any], text: str, *, longest: int, margin: int) -> float:
    """0 for answers of up to `longest - margin` characters, then less by a straight line, −1 from `longest` on."""
    return max(-1.0, min(0.0, (longest - margin - len(text)) / margin))


def plugs(parts: Sequence[Mapping[str, Any]]) -> list[Plug]:
    return [Plug(use=part["use"], args=part.get("args", {})) for part in parts]


async def weighted_at_once(row: Mapping[str, Any], text: str, *, parts: Sequence[Mapping[str, Any]]) -> float:
    """`weighted`, of which many may run at once."""
    total = 0.0
    for part, what in zip(parts, plugs(parts), strict=True):
        value = asynchronous(what)(row, text)
        total += part.get("weight", 1.0) * float(await value if inspect.isawaitable(value) else value)
    return total


@many_at_once(
    weighted_at_once,
    lambda *, parts: [line for what in plugs(parts) for line in first_lines(what)],
    where=lambda *, parts: any(is_asynchronous(asynchronous(what)) for what in plugs(parts)),
)
def weighted(row: Mapping[str, Any], text: str, *, parts: Sequence[Mapping[str, Any]]) -> float:
    """Σ weight · reward of `parts`, each {use, args, weight}; weight is 1 by default. If one has no result the sum has none."""
    return asyncio.run(weighted_at_once(row, text, parts=parts))


class Rewards:
    """One reward function in `processes` of its own. `close` ends them."""

    def __init__(self, reward: Plug, timeout_s: float = 10.0, *, processes: int = 1, retries: int = 1, within_s: float = 1800.0) -> None:
        self.reward, self.retries, self.within_s = reward, retries, within_s
        for line in first_lines(reward):
            print(line, flush=True)
        self.children = [Child("reward", reward, timeout_s) for _ in range(processes)]
        self.threads = [ThreadPoolExecutor(1) for _ in self.children]
        self.again = 0  # answers that were scored once more since this was last set to 0
        self.told = False  # whether a fault of these answers was said; of the others their number is

    def score(self, items: Sequence[Scored]) -> list[Reward | NoResult]:
        """Outcomes in order. Those without a result are asked for `retries` times more; after `within_s` seconds no more is asked."""
        until, self.told = time.monotonic() + self.within_s, False
        found = self._once(items, until)
        for _ in range(self.retries):
            failed = [i for i, outcome in enumerate(found) if isinstance(outcome, NoResult)]
            if not failed or time.monotonic() > until:
                break
            self.again += len(failed)
            for i, outcome in zip(failed, self._once([items[i] for i in failed], until), strict=True):
                found[i] = outcome
        return found

    def _once(self, items: Sequence[Scored], until: float) -> list[Reward | NoResult]:
        n = len(self.children)
        asked = [
            thread.submit(scored_by, child, items[i::n], until, self._tell) for i, (thread, child) in enumerate(zip(self.threads, self.children, strict=True))
        ]
        found: list[Any] = [None] * len(items)
        for i, part in enumerate(asked):
            found[i::n] = part.result()
        return found

    def _tell(self, reason: str) -> None:
        """When it happens, since those after it may each take as long as they are given."""
        if not self.told:
            self.told = True
            print(f"the reward {self.reward.use} has no result for an answer: {reason}", flush=True)

    def close(self) -> None:
        for child in self.children:
            child.close()
        for thread in self.threads:
            thread.shutdown(wait=False)


def scored_by(child: Child, items: Sequence[Scored], until: float, tell: Callable[[str], None]) -> list[Reward | NoResult]:
    """Outcomes in order; of what is left at `until`, by the monotonic clock, there are none. `tell` hears why an answer has none."""
    found: list[Reward | NoResult] = []
    while len(found) < len(items):
        if time.monotonic() > until:
            return [*found, *[NoResult("it was not asked: scoring took longer than compute.timeout_s")] * (len(items) - len(found))]
        for reply in child.replies([(dict(row), text) for row, text in items[len(found) :]]):
            if isinstance(reply, Fault):
                tell(reply.reason)
            found.append(NoResult(reply.reason) if isinstance(reply, Fault) else Reward(reply))
    return found


def score_groups(rewards: Rewards | None, groups: Sequence[Group]) -> list[Group]:
    """The groups with their outcomes; without rewards, with those that their environments gave them."""
    if rewards is None:
        return list(groups)
    outcomes = iter(rewards.score([(t.prompt.row, t.text) for group in groups for t in group]))
    return [tuple(replace(t, outcome=next(outcomes)) for t in group) for group in groups]
