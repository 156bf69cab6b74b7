"""`run_tests`, a coroutine function, decides whether a response's Python passes its tests; each side runs in a cell.

How well the cells are confined is decided before any code runs: `find_mode` tries the modes that this machine may
allow, best first. A run prints the mode, and `sandbox: strict` refuses a machine that has only the weaker ones.
"""

import asyncio
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptf.errors import UserError
from ptf.rl.event_loop import run_coroutine
from ptf.rl.rewards.sandbox.cells import MODES, Cell, spare_uid

STARTS_WITHIN_S = 60.0
COMMAND = [
    sys.executable,
    "-P",
    "-s",
    "-S",
    "-c",
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[4])!r}); "
    "from ptf.rl.rewards.sandbox.judgement import main; main()",
]
ENVIRONMENT = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a judgement."""

    value: float | None  # 1.0: all tests passed; 0.0: they did not; None: these tests cannot judge it
    why: str


class SandboxFault(Exception):
    """The sandbox itself failed; nothing is known of the response."""


def directories() -> tuple[list[str], list[str]]:
    """Return what a cell sees of the machine, outermost first, and Python's path in it.

    The path holds the library and what is installed, no project.
    """
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    base = os.path.realpath(sys.base_prefix)
    dynamic = f"{sysconfig.get_config_var('DESTSHARED') or ''}"
    path = list(dict.fromkeys(os.path.realpath(p) for p in [*paths[:2], dynamic, *paths[2:]] if p and os.path.isdir(p)))
    wanted = [
        "/usr",
        *(f"/{d}" for d in ("bin", "sbin", "lib", "lib64") if os.path.isdir(f"/{d}") and not os.path.islink(f"/{d}")),
        base,
        *path,
    ]
    seen: list[str] = []
    for one in wanted:
        if not any(Path(one).is_relative_to(other) for other in seen):
            seen.append(one)
    return seen, path


def command(mode: str, seconds: float, memory_mib: int, wall_s: float, **more: Any) -> list[str]:
    """Return the command that starts a judging process."""
    readable, path = directories()
    cell = Cell(
        mode=mode,
        seconds=seconds,
        memory_mib=memory_mib,
        processes=32,
        files_mib=16,
        readable=readable,
        path=path,
        bubblewrap=shutil.which("bwrap") or "",
        **more,
    )
    return [*COMMAND, json.dumps({**cell._asdict(), "place": tempfile.gettempdir(), "wall_s": wall_s})]


async def run_tests(
    answer: str,
    tests: Any,
    *,
    setup: Any = None,
    entry: str | None = None,
    seconds: float = 4.0,
    memory_mib: int = 512,
    mode: str | None = None,
    stderr: int | None = None,
    **more: Any,
) -> Verdict:
    """Return what the tests say of the response's code.

    `seconds` is the CPU time limit of each process; the two together have 2 × `seconds` of wall time. `stderr` is where
    the judging process writes its errors, by default as this process.

    Raise SandboxFault.
    """
    job = json.dumps(
        {"answer": answer, "tests": tests, "setup": setup, "entry": entry},
        default=lambda thing: {"type": type(thing).__name__},
    )
    process = await asyncio.create_subprocess_exec(
        *command(mode or find_mode(), seconds, memory_mib, 2 * seconds, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        env=ENVIRONMENT,
        limit=1 << 20,
    )
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(job.encode() + b"\n")
        reply = await asyncio.wait_for(process.stdout.readline(), STARTS_WITHIN_S + 2 * seconds)
    except TimeoutError:
        raise SandboxFault(f"it did not answer in {STARTS_WITHIN_S + 2 * seconds:g} s") from None
    finally:
        process.stdin.close()  # which ends it and all that it has started
        try:
            await asyncio.wait_for(process.wait(), STARTS_WITHIN_S)
        except TimeoutError:
            process.kill()
    found: dict[str, Any] = json.loads(reply) if reply else {"error": "its process died"}
    if "error" in found:
        raise SandboxFault(found["error"])
    return Verdict(None, found["none"]) if "none" in found else Verdict(found["value"], found["why"])


def candidates() -> Iterable[str]:
    """Return the modes that may be possible for this user, best first."""
    if os.getuid():
        return ("namespaces", "bubblewrap", "subreaper")
    try:
        spare_uid(0)
    except OSError:  # root of a user namespace that is really one user
        return ("namespaces", "bubblewrap")
    return ("uid+namespaces", "uid")


@functools.cache
def find_mode() -> str:
    """Return the best mode that works here: each is tried. Raise UserError if none does."""
    faults = []
    for mode in candidates():
        try:
            verdict = try_mode(mode)
            if verdict.value == 1.0:
                return mode
            faults.append(f"{mode}: {verdict.why}")
        except SandboxFault as fault:
            faults.append(f"{mode}: {fault}")
    raise UserError(
        "code cannot be judged here: nothing confines it. "
        + "; ".join(faults)
        + ". Give the container CAP_SYS_ADMIN or run as a user, with an interpreter "
        "that every user may read"
    )


def try_mode(mode: str) -> Verdict:
    """Judge a response for the first time in a mode. Raise SandboxFault where the mode does not work."""
    answer, tests = "def f(x):\n    return x + 1", "assert f(1) == 2"
    return run_coroutine(run_tests(answer, tests, seconds=10.0, mode=mode, stderr=subprocess.DEVNULL))


def sandbox_line(sandbox: str) -> str:
    """Return what confines code here, in a line for the run's beginning.

    Raise UserError where `sandbox: strict` asks for more.
    """
    if sandbox not in ("auto", "strict"):
        raise UserError(f"sandbox must be auto or strict, not {sandbox!r}")
    mode = find_mode()
    if mode != "subreaper":
        return f"code sandbox: {MODES[mode]}"
    weak = (
        f"code sandbox: {MODES[mode]} (this kernel allows no namespaces): a response can see this user's processes, "
        "and files where Landlock is missing"
    )
    if sandbox == "strict":
        raise UserError(
            f"{weak}. sandbox: strict refuses that: allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns), "
            "install bubblewrap, or run as root in a container"
        )
    return weak
