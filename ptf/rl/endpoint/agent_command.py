"""An agent that is a program: one is started for each episode."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.config.sections.rollout import HarnessConfig
from ptf.rl.endpoint.confined import ENDS_WITHIN_S, HarnessFault, confined, variables

MAX_RESULT = 1 << 20  # bytes
MAX_ERRORS = 1 << 16  # bytes of standard error that are kept


async def run(config: HarnessConfig, row: Mapping[str, Any], base_url: str, api_key: str, seed: int) -> str | None:
    """Run the program to its end; return the result that it wrote, None without one. Raises HarnessFault."""
    if missing := [name for name in config.columns if name not in row]:
        raise HarnessFault(f"the row has no column {missing[0]} (rollout.harness.columns)")
    task = {name: row[name] for name in ("messages", *config.columns) if name in row}
    line = json.dumps({**task, "seed": seed}, default=str).encode() + b"\n"
    with tempfile.TemporaryDirectory(prefix="ptf-harness-", ignore_cleanup_errors=True) as place:
        result = Path(place) / "result"
        process = await asyncio.create_subprocess_exec(
            *confined(config.command, place),
            env={
                **variables(config.env_vars, place),
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "PTF_RESULT": str(result),
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            status, errors = await _ended(process, line)
        finally:
            await _kill(process)
        if status != 0:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no line of error"]
            raise HarnessFault(f"the harness ended with status {status}: {last[0][:500]}")
        return _result(result)


async def _ended(process: asyncio.subprocess.Process, line: bytes) -> tuple[int, bytes]:
    """Give the program its line; return its status and the end of its standard error."""
    assert process.stdin is not None
    errors = bytearray()
    reading = asyncio.create_task(_keep_last(process.stderr, errors))
    try:
        with contextlib.suppress(OSError):  # it need not read it
            process.stdin.write(line)
            await process.stdin.drain()
            process.stdin.close()
        status = await process.wait()
        await asyncio.wait([reading], timeout=0.2)  # what it has started may hold the pipe open
    finally:
        reading.cancel()
    return status, bytes(errors)


async def _keep_last(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """Read a stream to its end, and keep its last bytes."""
    while stream is not None and (part := await stream.read(1 << 14)):
        kept += part
        del kept[:-MAX_ERRORS]


def _result(path: Path) -> str | None:
    """Return the text of the file that a harness wrote, None if there is none. Raises HarnessFault."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HarnessFault(f"the harness's result cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HarnessFault("the harness's result is no regular file")
    with open(descriptor, "rb") as file:
        text = file.read(MAX_RESULT + 1)
    if len(text) > MAX_RESULT:
        raise HarnessFault(f"the harness wrote a result of more than {MAX_RESULT} bytes")
    return text.decode(errors="replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the program with all that it has started; it has done so itself if it has ended."""
    if process.returncode is not None and process.returncode >= 0:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), ENDS_WITHIN_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
