"""The compiled kernels: found in the cache or compiled, verified and loaded.

A library is kept below `PTF_CACHE` (default `~/.cache/ptf`) for each source, compiler and processor. Its name ends with
the SHA-256 of its bytes, so that a damaged file is not loaded but compiled anew.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from ptf.errors import UserError

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
PROCESSOR = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-std=c++17", "-O3", PROCESSOR, "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
TIMEOUT_S = 300
DIGITS = 16  # of a digest


class Unavailable(UserError):
    """The kernels cannot be compiled on this machine; the message says why."""


class Library:
    """The functions of the kernels, which are given tensors, numbers and None (a null pointer)."""

    def __init__(self, file: Path, compiler: str) -> None:
        self._functions = ctypes.CDLL(str(file))
        self.width = int(self._functions.vector_width())
        """How many fp32 numbers a register holds."""
        self.version = f"{compiler}, {32 * self.width} bits"

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Call a function on contiguous tensors; an int is an int64, and a float a float of C. Raises MemoryError."""
        if self._functions[name](*map(_for_c, arguments)):
            raise MemoryError(f"cpu_kernels: {name} could not allocate its working memory")


def _for_c(value: Tensor | int | float | None) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


@functools.cache
def library() -> Library:
    """Return this process's kernels, compiled if they are not in the cache. Raises Unavailable."""
    command, version = _compiler()
    key = _digest("\0".join([*command, version, _processor(), *(f.read_text() for f in (*HEADERS, *SOURCES))]).encode())
    with tempfile.TemporaryDirectory(prefix="ptf-kernels-") as scratch:  # a loaded library needs its file no longer
        folder = _cache() or Path(scratch)
        for file in folder.glob(f"{key}-*.so"):
            if file.name == f"{key}-{_digest(file.read_bytes())}.so":
                return Library(file, version)
        return Library(_compiled(command, folder, key), version)


def unavailable() -> str | None:
    """Return why the kernels cannot be used on this machine, or None if they can."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def _compiler() -> tuple[list[str], str]:
    """Return the command of the compiler ($CXX, or the first of COMPILERS), and its name and version."""
    asked = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if found is None:
        missing = f"$CXX, {asked}, is not" if asked else f"none of {', '.join(COMPILERS)} is"
        raise Unavailable(f"{missing} installed, a C++ compiler")
    told = _run([found, "--version"])
    number = re.search(r"\d+\.\d+(\.\d+)?", told)
    return [found, *FLAGS], f"{'Clang' if 'clang' in told else 'GCC'} {number[0] if number else 'of no version'}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise Unavailable(f"{command[0]} failed: {first}")
    return done.stdout


def _processor() -> str:
    """Return what `native` stands for: the processor with its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _cache() -> Path | None:
    """Return the folder of compiled libraries, or None where it cannot be written."""
    try:
        folder = Path(os.environ.get("PTF_CACHE") or Path.home() / ".cache" / "ptf") / "cpu_kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _compiled(command: list[str], folder: Path, key: str) -> Path:
    """Compile a library into a folder; processes that do so at once do not meet each other's files."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as scratch:
        made = Path(scratch) / "kernels.so"
        _run([*command, *map(str, SOURCES), "-o", str(made)])
        if not made.exists():
            raise Unavailable(f"{command[0]} wrote no library")
        return made.replace(folder / f"{key}-{_digest(made.read_bytes())}.so")
