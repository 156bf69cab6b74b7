"""This interpreter in a process of its own."""

import subprocess
import sys
from typing import Any


def run_python(*arguments: object, timeout: float = 300, check: bool = False, **options: Any) -> Any:
    """Run it with these arguments; return the process, which has ended, with its status and what it printed."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=check, **options)
