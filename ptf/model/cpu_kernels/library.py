"""The compiled kernels: found in the cache or compiled, verified and loaded.

A library is kept below `PTF_CACHE` (default `~/.cache/ptf`) for each source, compiler and processor. Its name ends with
the first digits of the SHA-256 of its bytes, so that a damaged file is not loaded but compiled anew.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ptf.errors import UserError
from ptf.workspace import scratch

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
CPU_KERNELS = "cpu_kernels"  # among the packages of `train.fused`
COMPILERS = ("c++", "g++", "clang++")
PROCESSOR = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = (
    "-std=c++17",
    "-O3",
    PROCESSOR,
    "-fno-fast-math",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
TIMEOUT_S = 300
NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}  # of the functions for a dtype
DIGITS = 16  # of a digest
HOST = platform.node()


class Unavailable(UserError):
    """The kernels cannot be compiled on this machine; the message says why."""


class Library:
    """The functions of the kernels, which are given tensors, numbers and None (a null pointer)."""

    def __init__(self, file: Path) -> None:
        self._functions = ctypes.CDLL(str(file))
        self._functions.compiler.restype = ctypes.c_char_p
        self.width = int(self._functions.vector_width())
        """How many fp32 numbers a register holds."""
        self.multiplies_pairs = bool(self._functions.multiplies_pairs())
        """Whether it has products of bf16: of a head (head.cpp), and of a weight's gradient (products.cpp)."""
        narrow = "attention, heads and weights' gradients" if self.multiplies_pairs else "attention"
        of_pairs = f", products of bf16 in {narrow}" if self._functions.multiplies_bf16() else ""
        self.version = f"{self._functions.compiler().decode()}, {32 * self.width} bits, attention over caches{of_pairs}"

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Call a function on contiguous tensors; an int is an int64, and a float a float of C. Raises MemoryError."""
        if self._functions[name](*map(_for_c, arguments)):
            raise MemoryError(f"cpu_kernels: {name} could not allocate its working memory")


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels compute with these tensors: of one dtype that they know, plain and on a CPU."""
    dtype = tensors[0].dtype
    return dtype in NAMES and all(
        t.dtype == dtype and t.device.type == "cpu" and type(t) in (Tensor, Parameter) for t in tensors
    )


def _for_c(value: Tensor | int | float | None) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


def library() -> Library:
    """Return this process's kernels, compiled if they are not in the cache. Raises Unavailable."""
    if isinstance(found := find(), str):
        raise Unavailable(found)
    return found


def run(name: str, x: Tensor, *arguments: Tensor | int | float | None) -> None:
    """Call a kernel for the dtype of x on contiguous tensors, with as many threads as torch has."""
    library().call(f"{name}_{NAMES[x.dtype]}", x, *arguments, torch.get_num_threads())


def loaded() -> Library | None:
    """Return this process's kernels if it has looked for them and they are there."""
    return None if find.cache_info().currsize == 0 or isinstance(found := find(), str) else found


def unavailable() -> str | None:
    """Return why the kernels cannot be used on this machine, or None if they can."""
    return found if isinstance(found := find(), str) else None


def missed() -> str | None:
    """Return why this process does not have the kernels that it has looked for; None if it has them or did not look."""
    return unavailable() if find.cache_info().currsize else None


@functools.cache
def find() -> Library | str:
    """Return the kernels, or why they cannot be used."""
    try:
        command, told = _compiler()
        sources = (file.read_text() for file in (*HEADERS, *SOURCES))
        key = _digest("\0".join([*command, told, _processor(), *platform.libc_ver(), *sources]).encode())
        if (folder := _cache()) is None:
            with tempfile.TemporaryDirectory(prefix="ptf-kernels-") as place:  # a library that is loaded needs no file
                return Library(_compiled(command, Path(place), key))
        scratch.sweep(folder, 0, f"{HOST}-")  # locks of other hosts may not be seen here
        for file in folder.glob(f"{key}-*.so"):
            if file.name == f"{key}-{_digest(file.read_bytes())}.so":
                return Library(file)
        return Library(_compiled(command, folder, key))
    except Unavailable as error:
        return str(error)
    except OSError as error:  # no room, a file system without execution, a library that does not load
        return f"the compiled kernels could not be written or loaded: {error}"


def _compiler() -> tuple[list[str], str]:
    """Return the command of the compiler ($CXX, or the first of COMPILERS), and what it says of itself."""
    asked = shlex.split(os.environ.get("CXX", ""))
    found = next(filter(None, map(shutil.which, asked[:1] or COMPILERS)), None)
    if found is None:
        missing = f"$CXX, {asked[0]}, is not" if asked else f"none of {', '.join(COMPILERS)} is"
        raise Unavailable(f"{missing} installed, a C++ compiler")
    command = [found, *asked[1:]]
    return [*command, *FLAGS], _run([*command, "--version"])


def _run(command: list[str], temporary: Path | None = None) -> str:
    """Return what a command wrote; it has its temporary files in a directory if one is given."""
    environment = None if temporary is None else {**os.environ, "TMPDIR": str(temporary)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
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
    """Return the folder of compiled libraries, or None where it cannot be made, or other users can write to it: a
    library is code that this process runs."""
    try:
        folder = Path(os.environ.get("PTF_CACHE") or Path.home() / ".cache" / "ptf") / "cpu_kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        has = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        print(
            f"cpu_kernels: compiled anew in every process, as they cannot be kept ({error}); set PTF_CACHE", flush=True
        )
        return None
    if has.st_uid != os.getuid() or has.st_mode & 0o022:
        print(f"cpu_kernels: compiled anew in every process, as other users can write to {folder}", flush=True)
        return None
    return folder


def _compiled(command: list[str], folder: Path, key: str) -> Path:
    """Compile a library into a folder; processes that do so at once do not meet each other's files.

    What a killed process leaves, the compiler's own temporary files among it, lies in the folder until `sweep`.
    """
    with scratch.directory(folder / f"{HOST}-{key}") as place:
        place.chmod(0o700)
        made = place / "kernels.so"
        _run([*command, *map(str, SOURCES), "-o", str(made)], place)
        if not made.exists():
            raise Unavailable(f"{command[0]} wrote no library")
        return made.replace(folder / f"{key}-{_digest(made.read_bytes())}.so")
