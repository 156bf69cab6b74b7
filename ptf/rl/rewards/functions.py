"""The built-in rewards that are functions."""

import logging
import math
import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from ptf.rl.rewards.declarations import one_by_one
from ptf.rl.rewards.sandbox.run_tests import run_tests, sandbox_line


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
    from math_verify import parse, verify

    # it warns that its own time limits, which need a main thread, are off; the worker process has a limit
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = str(row[column]).rpartition(after)[2].strip() if after else str(row[column])
    wanted = parse(gold if re.search(r"\\|\$", gold) else f"${gold}$", parsing_timeout=0)
    if not wanted:
        raise ValueError(f"math-verify reads no expression in {gold[:60]!r}")
    return float(verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0))


async def code(
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
    """Return 1.0 if the response's Python (`last_block`) passes the tests in the row's `column`; else 0.0.

    The tests are a string or a list of strings. Rows whose tests are empty, assert nothing, never call the response's
    code, or cannot run are errors, hence responses without a result.

    `setup`: a column of code that runs before the tests. `entry`: a column with the name of the function to write.
    `seconds` of CPU time and `memory_mib` are limits of each process; `sandbox: strict` refuses the mode `subreaper`,
    which isolates least. Tests and response are two processes, separate from each other and from this one
    (ptf.rl.rewards.sandbox).
    """
    sandbox_line(sandbox)
    verdict = await run_tests(
        last_block(text),
        row[column],
        setup=row[setup] if setup else None,
        entry=str(row[entry]) if entry else None,
        seconds=seconds,
        memory_mib=memory_mib,
    )
    if verdict.value is None:
        raise ValueError(verdict.why)
    return verdict.value


vars(code).update(
    first_lines=lambda *, sandbox="auto", **_: [sandbox_line(sandbox)],
    max_concurrent_calls=lambda **_: len(os.sched_getaffinity(0)),
)


def last_block(text: str) -> str:
    """Return the code of a response.

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
    """Return a penalty for the number of characters of a response: 0 up to `longest - margin` of them, then linearly
    less, and −1 from `longest` on."""
    return max(-1.0, min(0.0, (longest - margin - len(text)) / margin))
