"""What the benchmarks keep and show: rows of results, tables, medians with their range, and pages."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.flow_runs import commit, cpu

Row = dict[str, Any]


def kept(file: Path) -> list[Row]:
    """The rows of a file of JSON lines, the oldest first; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(file: Path, *rows: Row) -> None:
    """Append rows to a file of JSON lines."""
    with file.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))


def today() -> str:
    return time.strftime("%Y-%m-%d")


def here() -> dict[str, str]:
    """What a row says of where it was measured."""
    return {"commit": commit(), "date": today(), "hardware": cpu()}


def told(rows: Iterable[Row], key: str) -> str:
    """All values of a key, once each."""
    return ", ".join(sorted({str(row[key]) for row in rows}))


def table(names: str | Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; names as one text are divided by ` | `."""
    names = names.split(" | ") if isinstance(names, str) else names
    first, *rest = (f"| {' | '.join(map(str, row))} |" for row in (names, *rows))
    return "\n".join([first, "|" + "---|" * len(names), *rest])


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median of rounds with their range; of a single round its value."""
    middle = f"{median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} – {max(values):{form}})"


def head(title: str, hardware: str = ", no GPU", date: str | None = None, command: str | None = None) -> str:
    """The beginning of a page: title, command (by default that of this process), processor with what is said after it,
    and date (by default that of today, with the commit)."""
    command = command or "`" + " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]) + "`"
    date = date or f"{today()}; commit {commit()}"
    return f"# {title}\n\nCommand: {command}  \nHardware: {cpu()}{hardware}  \nDate: {date}\n\n"


def apart(x: Sequence[float]) -> str:
    """A difference with its interval, as ptf.events.ranking_metrics.interval has it."""
    return f"{x[0]:+.4f} ({x[1]:+.4f} to {x[2]:+.4f})"


def write_page(page: Path, about: str, lines: Sequence[str], missed: Sequence[str] = ()) -> int:
    """Write a page of these words and a table; print its name and what missed its bar. Return the exit status."""
    page.write_text(about + "\n".join(lines) + "\n")
    print(f"wrote {page.name}" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0
