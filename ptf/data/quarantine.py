"""Bad rows that are set aside (`data.max_bad_rows_share`): a line of jsonl for each, with its location and the reason.

A row is written once, however often a resumed run meets it again, and a source whose share of bad rows is too large
stops the run.
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptf.data.sources.json_values import levels
from ptf.errors import UserError

FEW = 1000  # rows; the share of bad rows is taken of at least this many
# Exceptions that the values of a row can cause.
FAULTS = (UserError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was set aside, and why."""

    where: str  # "file:line"
    reason: str


def reason_of(error: BaseException, row: Any) -> str:
    """Return why a row is bad, as text that can be written.

    It is the message of a UserError; of any other error it is the type, the message and where the error was raised.
    """
    halves = (  # texts with a lone surrogate: JSON can hold one, UTF-8 cannot
        text
        for level in levels(row)
        for text in level
        if isinstance(text, str) and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    )
    if isinstance(error, UserError):
        reason = str(error)
    elif (half := next(halves, None)) is not None:
        reason = f"half of a character (a lone surrogate) in {half[:60]!r}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return reason.encode(errors="backslashreplace").decode()


class Quarantine:
    """The file of a source's bad rows, and the limit on their share."""

    def __init__(self, file: str | Path | None, max_bad_rows_share: float) -> None:
        """Create a quarantine.

        `max_bad_rows_share` is the largest share of a source's rows that may be bad. Without a file the rows are only
        counted, because another process writes them.
        """
        self.file = Path(file) if file else None
        self._max_bad = max_bad_rows_share
        self._written: set[str] | None = None  # locations; None until the file is read

    def add(self, row: BadRow, counts: Mapping[str, int]) -> None:
        """Set a row aside; `counts` are the `rows` so far, and how many of them were `bad`.

        Raises UserError when there are too many bad rows.
        """
        if self.file is not None:
            self._write(row, self.file)
        if counts["bad"] > self._max_bad * max(counts["rows"], FEW):
            raise UserError(
                f"{counts['bad']} of {counts['rows']} rows are bad, more than data.max_bad_rows_share "
                f"({self._max_bad:g}) allows; the last is {row.where}: {row.reason}"
            )

    def _write(self, row: BadRow, file: Path) -> None:
        """Append a row to the file, unless it is there already."""
        if self._written is None:
            self._written = {old.where for old in rows_in(file)}
        if row.where not in self._written:
            self._written.add(row.where)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab+") as out:
                torn = file.read_bytes()[-1:] not in (b"", b"\n")  # it ends inside a line
                out.write(
                    b"\n" * torn + json.dumps(asdict(row), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
                )


def rows_in(file: Path) -> list[BadRow]:
    """Return the rows that were set aside; a line that is incomplete or damaged is ignored."""
    rows = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            rows.append(BadRow(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows
