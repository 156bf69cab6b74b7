"""Bad rows set aside (`data.on_bad_row: skip`): a line of jsonl for each, with its place and the reason.

The one idea: a row is written once, however often a resumed run meets it again; and a source of which more than a small share is bad stops the run.
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptf.errors import UserError

FEW = 1000  # rows; a share of fewer is taken of so many
FAULTS = (UserError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)  # that a row's values may cause


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str  # "file:line"
    reason: str


def reason_of(error: BaseException, row: Any) -> str:
    """Why a row is bad, as text that can be written: the message of a UserError; of any other error its type, its message and where it was raised."""
    if isinstance(error, UserError):
        said = str(error)
    elif (half := _half_character(row)) is not None:
        said = f"half of a character (a lone surrogate) in {half[:60]!r}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return said.encode(errors="backslashreplace").decode()


def _half_character(value: Any) -> str | None:
    """A text with a lone surrogate inside the value, which JSON can say and UTF-8 cannot."""
    level = [value]
    while level:
        for text in level:
            if isinstance(text, str) and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                return text
        level = [inner for v in level if isinstance(v, dict | list) for inner in ((*v, *v.values()) if isinstance(v, dict) else v)]
    return None


class Quarantine:
    def __init__(self, file: str | Path | None, max_bad: float) -> None:
        """`max_bad` is the largest share of a source's rows that may be bad. Without a file they are only counted: another process writes them."""
        self.file, self._max_bad = Path(file) if file else None, max_bad
        self._seen: set[str] | None = None

    def add(self, row: BadRow, counts: Mapping[str, int]) -> None:
        """Set a row aside; `counts` are the `rows` so far, and how many of them were `bad`. Raises UserError when those are too many."""
        if self.file is not None:
            self._write(row, self.file)
        if counts["bad"] > self._max_bad * max(counts["rows"], FEW):
            raise UserError(
                f"{counts['bad']} of {counts['rows']} rows are bad, more than data.max_bad ({self._max_bad:g}) allows; the last is {row.where}: {row.reason}"
            )

    def _write(self, row: BadRow, file: Path) -> None:
        if self._seen is None:
            self._seen = {old.where for old in rows_in(file)}
        if row.where not in self._seen:
            self._seen.add(row.where)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab+") as out:
                out.write(b"\n" * _torn(file) + json.dumps(asdict(row), ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def rows_in(file: Path) -> list[BadRow]:
    """What was set aside; a line that a kill cut off, or that was damaged, does not count."""
    found = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            found.append(BadRow(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def _torn(file: Path) -> bool:
    return file.stat().st_size > 0 and file.read_bytes()[-1:] != b"\n"
