"""The end of a benchmark: its page, and whether a bar was missed."""

from collections.abc import Sequence
from pathlib import Path


def write_page(page: Path, about: str, lines: Sequence[str], missed: Sequence[str]) -> int:
    """Write a page of these words and a table; print its name and what missed its bar. Return the exit status."""
    page.write_text(about + "\n".join(lines) + "\n")
    print(f"wrote {page.name}" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0
