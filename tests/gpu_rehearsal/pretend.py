"""A process in which device "cuda" exists for fake tensors, on a machine without a GPU.

The library is built from pretend_cuda.cpp where a C++ compiler is found, once for each version of torch and of the
source, beside the packages of the environment. Torch must not be imported before it is loaded, so a process is spawned
for it; functions that it runs are given by reference, from modules that it imports itself.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("pretend_cuda.cpp")
TIMEOUT_S = 600.0


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def torch_directory() -> Path:
    """Return the directory of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """Return the library, built if it is not there. Raises RuntimeError with the compiler's words if that fails."""
    command = compiler()
    if command is None:
        raise RuntimeError("there is no C++ compiler")
    text = SOURCE.read_bytes() + importlib.metadata.version("torch").encode()
    library = Path(sys.prefix) / "lib" / f"ptf-pretend-cuda-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    torch = torch_directory()
    part = library.with_suffix(f".{os.getpid()}")  # several processes may build it at once
    arguments = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", str(SOURCE), "-o", str(part)]
    arguments += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    made = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    if made.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"{SOURCE.name} does not compile: {made.stderr[-2000:]}")
    os.replace(part, library)
    return library


def _load(library: str) -> None:
    """Load the library before torch is imported; the initializer of the process."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_directory() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch

    torch.cuda._lazy_init = lambda: None  # it refuses a build without CUDA
    torch.Tensor.pin_memory = lambda tensor: tensor  # fake tensors have no page-locked memory
    # a build without CUDA has neither, and FSDP asks for them
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.Stream = lambda device=None, priority=0: torch.Stream("cuda")
    torch.cuda.Event = lambda: torch.Event("cuda")
    torch.cuda.current_stream = lambda device=None: torch.accelerator.current_stream()  # dynamo wants it to be its own
    torch.cuda.stream = contextlib.nullcontext


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what the function returns. What it raises may not be picklable, so its traceback is raised as text."""
    try:
        return function(*args)
    except Exception:
        text = traceback.format_exc()
    raise RuntimeError(text)


class PretendCuda:
    """Runs functions in the process, one at a time."""

    def __init__(self, library: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_load, initargs=(str(library),))

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns there, which must be picklable, as must the arguments.

        Raises RuntimeError, with the traceback, if the function raises.
        """
        return self._pool.submit(_run, function, args).result(timeout=TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()
