"""Files of JSON lines that are read while somebody may still write them."""

import json
from pathlib import Path
from typing import Any

from ptf.errors import UserError


def json_lines(path: Path, at_most: int | None = None, number: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, or of its last `at_most` bytes; a last line that was cut off is omitted.

    Raises UserError, which names the line, if any other line is not a row, or has no whole number of the name `number`.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - at_most) if at_most else 0
        file.seek(skipped)
        lines = file.read().splitlines()[bool(skipped) :]
    rows = []
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or (number and not isinstance(row.get(number), int)):
                raise ValueError
        except ValueError:  # invalid JSON or UTF-8
            if place == len(lines):
                break
            raise UserError(
                f"{path}:{place}{' of its end' if skipped else ''} is not a row: the file was damaged; restore it, "
                "or remove it to continue without it"
            ) from None
        rows.append(row)
    return rows
