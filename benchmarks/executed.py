"""What a tiny job executes of ptf: the files and functions that one whole SFT enters, and GRPO to its second sync.

    python benchmarks/executed.py [SFT | GRPO]

Prints a line of JSON. All threads of the process count, its children do not, and neither do lambdas.
"""

import argparse
import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"


def executed(name: str, directory: Path) -> dict[str, int]:
    """Run a job of same_bits.py and return how many files and functions of ptf it entered, from the config on."""
    from benchmarks.same_bits import JOBS

    raw = JOBS[name](directory)
    if name == "GRPO":
        raw["train"] |= {"steps": 2, "validate_every": 0}
    text = yaml.safe_dump(raw)
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        from ptf.config import loads
        from ptf.run import run

        run(loads(text), "run")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    package = str(ROOT / "ptf") + os.sep
    entered = {
        (code.co_filename, code.co_qualname)
        for code in seen
        if code.co_filename.startswith(package) and is_function(code)
    }
    return {"files": len({file for file, _ in entered}), "functions": len(entered)}


def is_function(code: CodeType) -> bool:
    """Return whether the code is that of a named function: of no module, class body, lambda or generator expression."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default="SFT", choices=["SFT", "GRPO"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        found = executed(asked.job, Path(scratch))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
