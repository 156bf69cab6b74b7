"""Attempts at a run, each a process that is forked from this one, which has imported what a run imports and never
trained.

What a fork inherits is code, not state, so an attempt takes a second and not six, and killing it kills what killing a
user's run does.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ptf.config import loads
from ptf.run import run
from tests.reliability.ends import result
from tests.reliability.traps import Trap, arm

DEADLINE_S = 240.0
RUN_NAME = "run"


def nothing() -> None: ...


def attempt(
    raw: dict[str, Any],
    run_name: str,
    trap: Trap | None,
    log: Path,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
    temporary: Path | None = None,
    work: Callable[[], object] | None = None,
) -> int:
    """Run it in a process of its own, and how that ended: 0, a status, or minus a signal. `before` is called there
    first, `after` last. Temporary files and what is remembered of verified files lie beside the log, but where
    `temporary` is given. `work` is done in place of the run."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setpgid(0, 0)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= places(log, temporary)
            tempfile.tempdir = None
            before()
            if trap:
                arm(trap, raw["output"], note_of(log))
            if work:
                work()
            else:
                run(loads(yaml.safe_dump(raw)), run_name)
            after()
            status = 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(status)
    with contextlib.suppress(OSError):  # it has done so itself, or has ended
        os.setpgid(pid, pid)
    return _ended(pid, trap.at if trap and trap.kind == "time" else None)


def places(log: Path, temporary: Path | None = None) -> dict[str, str]:
    """Directories of one trial's own, by the variable that names them."""
    found = {"TMPDIR": temporary or log.parent / "temporary", "PTF_CACHE": log.parent / "cache"}
    for place in found.values():
        place.mkdir(parents=True, exist_ok=True)
    return {name: str(place) for name, place in found.items()}


def note_of(log: Path) -> Path:
    return log.with_suffix(".died")


def _ended(pid: int, killed_after: float | None = None) -> int:
    began = time.monotonic()
    while (spent := time.monotonic() - began) < DEADLINE_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if killed_after is not None and spent >= killed_after:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01 if killed_after is None else min(0.01, max(0.0, killed_after - spent)))
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"a run did not end within {DEADLINE_S:g} s")


def warm(raw: dict[str, Any], log: Path, temporary: Path | None = None) -> dict[str, Any]:
    """Import what a run of this job imports, which a run in a process of its own finds. Returns what that run left."""
    note, known = log.with_suffix(".modules"), set(sys.modules)

    def after():
        return note.write_text("\n".join(name for name in sys.modules if name not in known))

    assert attempt(raw, RUN_NAME, None, log, after=after, temporary=temporary) == 0, log.read_text()[-3000:]
    for name in note.read_text().splitlines():
        with contextlib.suppress(Exception):  # names that are no modules of files
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collecting does not copy the pages of all that was imported
    return result(Path(raw["output"]) / RUN_NAME)
